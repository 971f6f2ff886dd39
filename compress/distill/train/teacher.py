"""Whoever a draft learns from: a loaded artifact, a transformers model, or anything that turns token ids into logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from compress.distill.train.data import Batch, TextRows, Told, check_rows, mix, written_mask
from compress.distill.train.sampling import continuations
from runtime.errors import CompressError, RequestError

Logits = Callable[[torch.Tensor], torch.Tensor]
#: prompts `[b, p]`, tokens, temperature, seeds -> what was written `[b, p + tokens]` and how much of it counts `[b]`
Continue = Callable[[torch.Tensor, int, float, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


class Teacher:
    """What is imitated.

    Attributes:
        vocabulary: width of its logits.
        fingerprint: of its weights, if known; a cache of its logits is held to it.
        ends: ids that end its texts.
        device: where it computes.
        source: what it was made of, the loaded model itself; None: a function of logits.
    """

    def __init__(
        self,
        logits: Logits,
        vocabulary: int,
        *,
        fingerprint: str = "",
        ends: frozenset[int] = frozenset(),
        device: torch.device | None = None,
        write: Continue | None = None,
        source: Any = None,
    ) -> None:
        """
        Args:
            logits: token ids int64 `[b, s]` to logits `[b, s, vocabulary]` of what follows each.
            write: continues prompts; None: it cannot.
        """
        self._logits, self._write = logits, write
        self.vocabulary, self.fingerprint, self.ends = vocabulary, fingerprint, ends
        self.device = torch.device("cpu") if device is None else device
        self.source = source

    @classmethod
    def of(cls, model: Any, fingerprint: str | None = None) -> Teacher:
        """A teacher out of what `runtime.load` returned, or out of a causal language model of transformers.

        Args:
            model: of which; a Teacher is returned as it is.
            fingerprint: None: that of the loaded directory; of a transformers model there is none.

        Raises:
            RequestError: it is neither.
        """
        from transformers import PreTrainedModel

        from runtime.api.model import Model

        if isinstance(model, Teacher):
            return model
        if isinstance(model, Model):
            checkpoint = getattr(model.artifact, "checkpoint", None)
            known = "" if checkpoint is None else checkpoint.fingerprint()
            return cls(
                model.logits,
                model.engine.vocab_size,
                fingerprint=known if fingerprint is None else fingerprint,
                ends=model.eos_token_ids,
                device=model.engine.device,
                write=_Writer(model),
                source=model,
            )
        if isinstance(model, PreTrainedModel):
            end = model.config.get_text_config(decoder=True).eos_token_id
            ends = frozenset([end] if isinstance(end, int) else end or [])
            return cls(
                _Forward(model),
                model.config.get_text_config(decoder=True).vocab_size,
                fingerprint=fingerprint or "",
                ends=ends,
                device=model.device,
                write=lambda prompts, tokens, temperature, seeds: continuations(
                    model, prompts, tokens, temperature, seeds, ends
                ),
                source=model,
            )
        raise RequestError(
            f"a {type(model).__name__} is no teacher: give what runtime.load returns, a causal language model of transformers, or a Teacher"
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What tells it from other teachers, JSON-able."""
        return {"fingerprint": self.fingerprint}

    def targets(self, batch: Batch) -> torch.Tensor:
        """Logits `[b, s, vocabulary]` of a batch."""
        return self.logits(batch.ids)

    @property
    def writes(self) -> bool:
        """Whether it can continue texts."""
        return self._write is not None

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 `[b, s, vocabulary]` on the device of `ids` `[b, s]`; CompressError when they are NaN."""
        logits = self._logits(ids)
        if logits.shape != (*ids.shape, self.vocabulary):
            raise RequestError(
                f"the teacher's logits are {list(logits.shape)} for ids {list(ids.shape)}; expected a vocabulary of {self.vocabulary}"
            )
        if bool(torch.isnan(logits).any()):
            raise CompressError("the teacher gives logits that are NaN")
        # What was computed in inference mode cannot take part in a loss; a copy can.
        return logits.to(ids.device, torch.float32, copy=logits.is_inference())

    def continuations(
        self, prompts: torch.Tensor, tokens: int, temperature: float, seeds: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What it writes after prompts int64 `[b, p]`: int64 `[b, p + tokens]`, padded, and how many tokens of it count, `[b]`.

        Raises:
            RequestError: it cannot write, or no tokens are asked for.
        """
        if self._write is None:
            raise RequestError("this teacher cannot write texts: it was made of a function of logits only")
        if tokens < 1:
            raise RequestError(f"tokens to write must be at least 1, not {tokens}")
        return self._write(prompts, tokens, temperature, seeds)


class _Forward:
    """Logits of a transformers model, on its device."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        training = self.model.training
        self.model.eval()
        try:
            logits: torch.Tensor = self.model(input_ids=ids.to(self.model.device), use_cache=False).logits
        finally:
            self.model.train(training)
        return logits


class _Writer:
    """Texts of a loaded model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self, prompts: torch.Tensor, tokens: int, temperature: float, seeds: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = self.model.generate(
            prompts.tolist(), max_new_tokens=tokens, temperature=temperature, seed=list(seeds), ignore_eos=True
        )
        written = torch.tensor(new, dtype=torch.int64)
        # Cut here, where the end token is still there: whether a draft foresees the end is part of its acceptance.
        ends = torch.isin(written, torch.tensor(sorted(self.model.eos_token_ids), dtype=torch.int64))
        first = torch.where(ends.any(1), ends.int().argmax(1) + 1, tokens)
        after = torch.arange(tokens) >= first[:, None]
        last = written.gather(1, (first - 1)[:, None])
        return torch.cat([prompts.cpu(), torch.where(after, last, written)], 1), first


def teacher_rows(
    teacher: Teacher,
    prompts: torch.Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch: int = 16,
    told: Told | None = None,
) -> TextRows:
    """Rows that the teacher continues (DistillSpec, arXiv 2310.08461): what it would write is what a draft has to guess.

    Args:
        teacher: one that generates.
        prompts: int64 `[n, p]`.
        tokens: at most so many are written after each; a text that ends sooner is padded, and counts up to its end token.
        temperature: 0: the likeliest tokens.
        seed: a row's text depends on it and on the row's index only.
        batch: rows at once.
        told: is called with rows done and rows in all.

    Returns:
        int64 `[n, p + tokens]`, of which what the teacher wrote is trained on.
    """
    check_rows(prompts, "prompts", 1)
    ids, trained = [], []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        seeds = [mix(seed, index) for index in range(start, start + len(part))]
        written, lengths = teacher.continuations(part, tokens, temperature, seeds)
        ids.append(written)
        trained.append(written_mask(part.shape[1], lengths, tokens))
        if told is not None:
            told(start + len(part), len(prompts))
    return TextRows(torch.cat(ids), torch.cat(trained), "teacher")
