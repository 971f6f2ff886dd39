"""Removal of tokens: rows of the embeddings and of the head, and the tokenizer's entries. Nothing else of the model changes."""

from __future__ import annotations

from typing import Any

import torch

from compress.model.streamed import Batch, StreamedModel, run_blocks
from compress.prune.structure.removal import Cut, Lines, Pass, Removal, Tensors, check_finite
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError


class TokenRemoval(Removal):
    """Copies all blocks, and cuts the tensors whose shapes the size of the vocabulary decides."""

    def __init__(self, run: Pass) -> None:
        super().__init__(run)
        assert run.job.tokens is not None
        self._tokens = run.job.tokens
        self._kept = self._tokens.kept

    def outside(self) -> tuple[Tensors, Lines]:
        """All that is in no block; CompressError where a weight holds NaN or Inf."""
        tensors, lines = super().outside()
        check_finite(tensors)
        cut = Cut((part, self._kept) for part in self.job.slices)
        return cut.all(tensors), lines

    def finish(self, lines: Lines) -> dict[str, Any]:
        """{"special": tokens that always stay, "padding": rows without a token that stay}; writes the tokenizer."""
        self._tokens.write(self.run.output)
        vocabulary = self._tokens.vocabulary
        return {"special": len(vocabulary.special), "padding": len(set(self._kept.tolist()) - vocabulary.ids)}

    @torch.inference_mode()
    def expected(self) -> tuple[Batch, torch.Tensor]:
        """See `Removal.expected`, in the new ids; the smaller model's logits are the whole one's of the tokens that stay."""
        whole, kept = self.whole, self._kept
        ids = self.run.probe[0] % self.job.kept
        batch = (ids, None)
        found = run_blocks(whole, [(kept[ids], None)], None).get(0)
        if whole.kind == "encoder":
            return batch, found
        state = found.to(whole.device)
        smaller = StreamedModel(Checkpoint(self.run.output), whole.device, dtype=whole.dtype)
        run_blocks(smaller, [batch], None)  # an encoder-decoder learns here how its decoder is called
        given = smaller.outputs(state, ids)
        wanted = whole.outputs(state, kept[ids])[..., kept.to(state.device)]
        if not torch.allclose(given.float(), wanted.float(), rtol=1e-2, atol=1e-2):
            raise CompressError(
                f"{self.run.output} gives other logits than the whole model for the tokens that stay; this is a bug"
            )
        return batch, found
