"""Engine of encoders: a transformers model whose compressed layers keep their weights packed."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.torch.engine import ModuleEngine
from runtime.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TorchEncoderEngine(ModuleEngine):
    """Runs the base model of a transformers encoder (heads are left alone); see `runtime.engines.base.EncoderEngine`.

    Raises:
        ArtifactError: the model does not read token ids.
    """

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        super().__init__(module, device)
        self._base: Any = module.base_model
        embeddings = module.get_input_embeddings()
        if not isinstance(getattr(embeddings, "num_embeddings", None), int):
            raise ArtifactError(
                f"{type(module).__name__} has no embedding of token ids; this runtime runs text encoders"
            )
        config = module.config.get_text_config()
        self.vocab_size: int = embeddings.num_embeddings  # type: ignore[union-attr, assignment]
        self.hidden_size = int(config.hidden_size)
        self.context_length = position_limit(module)
        self._takes_segments = "token_type_ids" in inspect.signature(self._base.forward).parameters

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Last hidden states, float32 `[batch, length, hidden]`; without a mask every token counts."""
        # Models differ in what they make of a missing mask: some look for padding ids themselves.
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        segments = {"token_type_ids": torch.zeros_like(input_ids)} if self._takes_segments else {}
        with self.products():
            return self._base(input_ids=input_ids, attention_mask=mask, **segments).last_hidden_state.float()


def position_limit(module: PreTrainedModel) -> int | None:
    """Most tokens of a row: as many as there are learned positions; None where positions are relative."""
    config = module.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    # RoBERTa's positions begin after the padding id, so its table has more rows than there are positions.
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding) and name.rpartition(".")[2] == "position_embeddings":
            padding = child.padding_idx
            return limit - padding - 1 if padding is not None else limit
    return limit
