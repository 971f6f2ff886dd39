"""Inputs of a frozen target's head, for heads trained on it: computed as the target runs, once for each row."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from compress.distill.train.teacher import Teacher
from runtime.drafting.drafters.heads import TargetParts
from runtime.engines.base import Chunk, Engine
from runtime.engines.torch.drafts import states_of
from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEEP_BYTES = 1 << 30
_PROBE = (2, 5)  # rows and tokens on which head and states are compared with the target's logits


class Features:
    """Hidden states of a target, after its final norm.

    Attributes:
        parts: its embedding and head.
        config: of its text model. module: of transformers.
        teacher: its logits are the head of these states, so that a batch whose states are kept costs no pass of the target.
    """

    def __init__(self, engine: Any, base: Teacher, keep_bytes: int) -> None:
        self.parts, self.module = TargetParts.of(engine, "target"), engine.module
        self._states = _Forward(self.module) if engine.lockstep else _Verified(engine)
        self.config: PretrainedConfig = self.module.config.get_text_config(decoder=True)
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._room = 0  # what is checked is not kept
        self._check(base)
        self._room = keep_bytes
        self.teacher = Teacher(
            self.logits, self.parts.vocabulary, fingerprint=base.fingerprint, ends=base.ends, device=base.device,
            write=base.continuations if base.writes else None, source=base.source,
        )  # fmt: skip

    @classmethod
    def of(cls, target: Any, keep_bytes: int = KEEP_BYTES) -> Features:
        """Of what `runtime.load` returned, or of a causal language model of transformers.

        Args:
            target: an engine that verifies drafts computes the states just as it will when the heads run.
            keep_bytes: states of rows that were read are kept in so much memory, float32.

        Raises:
            RequestError: it is neither, or it does more to its logits than its head.
        """
        from transformers import PreTrainedModel

        from runtime.api.model import Model

        base = Teacher.of(target)
        if isinstance(target, Model):
            return cls(target.engine, base, keep_bytes)
        if not isinstance(target, PreTrainedModel):
            raise RequestError(
                f"heads are trained on what runtime.load returns or a causal language model of transformers, not a {type(target).__name__}"
            )
        engine = SimpleNamespace(
            module=target, device=target.device, vocab_size=target.get_input_embeddings().num_embeddings,
            description=type(target).__name__, lockstep=True,
        )  # fmt: skip
        return cls(engine, base, keep_bytes)

    @torch.no_grad()
    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 `[b, s, hidden]` on the device of `ids` `[b, s]`."""
        names = [row.numpy().tobytes() for row in ids.cpu()]
        found: dict[bytes, torch.Tensor] = {}
        for name in names:
            if name in self._kept:
                self._kept.move_to_end(name)
                found[name] = self._kept[name]
        missing = [index for index, name in enumerate(names) if name not in found]
        if missing:
            for index, states in zip(missing, self._states(ids[missing]), strict=True):
                found[names[index]] = self._keep(names[index], states.to("cpu", torch.float32, copy=True))
        return torch.stack([found[name] for name in names]).to(ids.device)

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """What the target says after each token, float32 `[b, s, vocabulary]` on the device of `ids`."""
        found = self.parts.logits(self.hidden(ids).to(self.parts.device))
        return found.to(ids.device, copy=found.is_inference())

    def _keep(self, name: bytes, states: torch.Tensor) -> torch.Tensor:
        size = states.numel() * states.element_size()
        if size <= self._room:
            self._kept[name] = states
            self._room -= size
            return states
        while self._kept and size > self._room:
            _, old = self._kept.popitem(last=False)
            self._room += old.numel() * old.element_size()
        return self._keep(name, states) if size <= self._room else states

    def _check(self, teacher: Teacher) -> None:
        """Head and states must give the target's own logits (some families scale or cap them)."""
        rows, size = _PROBE
        ids = torch.arange(rows * size).view(rows, size) % self.parts.vocabulary
        ours, own = self.logits(ids), teacher.logits(ids)
        if float((ours - own).norm() / own.norm()) > 0.05:
            raise RequestError(
                f"a {type(self.module).__name__} does more to its logits than its head; heads cannot be trained on it"
            )


class _Verified:
    """States of a paged engine, row by row, in steps as large as it takes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        engine, (rows, length) = self._engine, ids.shape
        pages = -(-length // engine.page_size)
        together = max(1, engine.most_rows // length)
        found = []
        for first in range(0, rows, together):
            part = ids[first : first + together].tolist()
            pool = engine.new_pages(pages * len(part))
            found.append(torch.stack(self._read(pool, part, pages)))
        return torch.cat(found)

    def _read(self, pool: Any, rows: Sequence[list[int]], pages: int) -> list[torch.Tensor]:
        """Of each row `[s, hidden]`; several rows fit in one step whole, one row may take several."""
        engine, steps = self._engine, []
        size = len(rows[0]) if len(rows) > 1 else engine.most_rows
        for start in range(0, len(rows[0]), size):
            pieces = [
                Chunk(row[start : start + size], start, range(index * pages, (index + 1) * pages))
                for index, row in enumerate(rows)
            ]
            hidden = engine.verify(pool, pieces, hidden=True)[1]
            assert hidden is not None
            steps.append(hidden.view(len(rows), -1, hidden.shape[-1]))
        return list(torch.cat(steps, 1))


class _Forward:
    """States of a transformers model, on its device."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        training = self._module.training
        self._module.eval()
        try:
            with states_of(self._module) as states:
                self._module(input_ids=ids.to(self._module.device), use_cache=False)
        finally:
            self._module.train(training)
        return states[0]
