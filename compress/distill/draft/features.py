"""Inputs of a frozen target's head, for heads trained on it: computed as the target runs, once for each row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from compress.distill.train.teacher import Teacher
from compress.model.module_hooks import evaluating
from runtime.drafting.drafters.heads import TargetParts
from runtime.engines.base import Chunk
from runtime.engines.torch.drafts import states_of
from runtime.engines.torch.engine import LARGEST_WIDENED
from runtime.errors import RequestError
from runtime.layers.dense_products import products_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEEP_BYTES = 1 << 30
_PROBE = (2, 5)  # rows and tokens on which head and states are compared with the target's logits


class Features:
    """Hidden states of a target, after its final norm.

    Args:
        engine: the target's; one that verifies drafts computes the states just as it will when the heads run.
        base: the target as a teacher.
        keep_bytes: states of the rows read last are kept in so much memory, float32.

    Attributes:
        parts: its embedding and head.
        config: of its text model. module: of transformers.
        teacher: its logits are the head of these states, so that a batch whose states are kept costs no pass of the target.

    Raises:
        RequestError: it does more to its logits than its head.
    """

    def __init__(self, engine: Any, base: Teacher, keep_bytes: int = KEEP_BYTES) -> None:
        self.parts, self.module, self._engine = TargetParts.of(engine, "target"), engine.module, engine
        self.config: PretrainedConfig = self.module.config.get_text_config(decoder=True)
        self.teacher = replace(base, forward=self.logits)
        self._kept: dict[bytes, torch.Tensor] = {}  # by ids; the row read last is last
        self._most = keep_bytes
        self._check(base)

    @torch.no_grad()
    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 `[b, s, hidden]` on the device of `ids` `[b, s]`."""
        names = [row.numpy().tobytes() for row in ids.cpu()]
        found = {name: self._kept.pop(name) for name in dict.fromkeys(names) if name in self._kept}
        missing = [index for index, name in enumerate(names) if name not in found]
        if missing:
            for index, states in zip(missing, self._states(ids[missing]), strict=True):
                found[names[index]] = states.to("cpu", torch.float32, copy=True)
        self._kept |= found
        while sum(states.nbytes for states in self._kept.values()) > self._most:
            del self._kept[next(iter(self._kept))]
        return torch.stack([found[name] for name in names]).to(ids.device)

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """What the target says after each token, float32 `[b, s, vocabulary]` on the device of `ids`."""
        found = self.parts.logits(self.hidden(ids).to(self.parts.device))
        return found.to(ids.device, copy=found.is_inference())

    def _check(self, teacher: Teacher) -> None:
        """Head and states must give the target's own logits (some families scale or cap them)."""
        rows, size = _PROBE
        ids = torch.arange(rows * size).view(rows, size) % self.parts.vocabulary
        ours, own = self.logits(ids), teacher.logits(ids)
        if float((ours - own).norm() / own.norm()) > 0.05:
            raise RequestError(
                f"a {type(self.module).__name__} does more to its logits than its head; heads cannot be trained on it"
            )

    def _states(self, ids: torch.Tensor) -> torch.Tensor:
        """`[b, s, hidden]`: of a paged engine row by row, in steps as large as it takes; else of transformers' module."""
        engine = self._engine
        if engine.lockstep:
            as_in_engine = products_of(self.module, self.module.device, LARGEST_WIDENED)
            with evaluating(self.module), states_of(self.module) as states, as_in_engine:
                self.module(input_ids=ids.to(self.module.device), use_cache=False)
            return states[0]
        pages, size = range(-(-ids.shape[1] // engine.page_size)), engine.most_rows
        pool, found = engine.new_pages(len(pages)), []
        for row in ids.tolist():
            chunks = [Chunk(row[start : start + size], start, pages) for start in range(0, len(row), size)]
            found.append(torch.cat([engine.verify(pool, [chunk], hidden=True)[1] for chunk in chunks]))
        return torch.stack(found)
