"""Teacher of a draft: a loaded artifact, a transformers model, or anything that turns token ids into logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from compress.distill.train.data import Batch, TextRows, Told, check_rows, mix, written_mask
from compress.distill.train.sampling import continuations
from runtime.errors import CompressError, RequestError

Logits = Callable[[torch.Tensor], torch.Tensor]
#: prompts `[b, p]`, tokens, temperature, seeds -> what was written `[b, p + tokens]` and how much of it counts `[b]`
Continue = Callable[[torch.Tensor, int, float, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(eq=False)
class Teacher:
    """The model that is imitated.

    Attributes:
        forward: token ids int64 `[b, s]` to logits `[b, s, vocabulary]` of what follows each.
        vocabulary: width of its logits.
        fingerprint: of its weights, if known; the cache of its logits records it.
        ends: ids that end its sequences.
        device: where it computes.
        write: continues prompts; None: it cannot.
        source: the loaded model itself; None: the teacher is a function of logits.
    """

    forward: Logits
    vocabulary: int
    fingerprint: str = ""
    ends: frozenset[int] = frozenset()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    write: Continue | None = None
    source: Any = None

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
            checkpoint, device = getattr(model.artifact, "checkpoint", None), model.engine.device
            known = "" if checkpoint is None else checkpoint.fingerprint()
            name = known if fingerprint is None else fingerprint
            write, size = partial(_continued, model), model.engine.vocab_size
            return cls(model.logits, size, name, model.eos_token_ids, device, write, model)
        if isinstance(model, PreTrainedModel):
            config = model.config.get_text_config(decoder=True)
            end = config.eos_token_id
            ends = frozenset([end] if isinstance(end, int) else end or [])
            forward, write = partial(_logits, model), partial(continuations, model, ends=ends)
            return cls(forward, config.vocab_size, fingerprint or "", ends, model.device, write, model)
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
        return self.write is not None

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 `[b, s, vocabulary]` on the device of `ids` `[b, s]`; CompressError when they are NaN."""
        logits = self.forward(ids)
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
        if self.write is None:
            raise RequestError("this teacher cannot write texts: it was made of a function of logits only")
        if tokens < 1:
            raise RequestError(f"tokens to write must be at least 1, not {tokens}")
        return self.write(prompts, tokens, temperature, seeds)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a transformers model, on its device."""
    training = model.training
    model.eval()
    try:
        logits: torch.Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits
    finally:
        model.train(training)
    return logits


def _continued(
    model: Any, prompts: torch.Tensor, tokens: int, temperature: float, seeds: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts continued by a loaded model, and how many of the tokens count."""
    new = model.generate(
        prompts.tolist(), max_new_tokens=tokens, temperature=temperature, seed=list(seeds), ignore_eos=True
    )
    written = torch.tensor(new, dtype=torch.int64)
    # Cut here, where the end token is still there: whether a draft foresees the end is part of its acceptance.
    ends = torch.isin(written, torch.tensor(sorted(model.eos_token_ids), dtype=torch.int64))
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
