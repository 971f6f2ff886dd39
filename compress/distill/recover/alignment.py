"""Counterparts of the teacher's layers, hidden dimensions and tokens in a smaller student."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from compress.distill.recover.outputs import Outputs
from compress.distill.train.data import digest_of


@dataclass(frozen=True)
class Alignment:
    """Layers, hidden dimensions and tokens of the teacher that the model still has, in the model's order.

    Attributes:
        layers: the numbers of the teacher's blocks, over all stacks, whose hidden states are compared.
        dimensions: int64 `[hidden]`, of the teacher's hidden state; None: all.
        tokens: int64 `[vocab]`, the teacher's ids of the model's tokens; None: all, as they are.
    """

    layers: Sequence[int] = ()
    dimensions: torch.Tensor | None = None
    tokens: torch.Tensor | None = None

    @classmethod
    def of(cls, stacks: Sequence[int], passes: Sequence[Mapping[str, Any]], tokens: torch.Tensor | None) -> Alignment:
        """The alignment of a model that earlier stages have pruned.

        Args:
            stacks: number of layers of each stack of the teacher. passes: facts of the structure passes, in order.
            tokens: see the attribute.
        """
        kept = [list(range(depth)) for depth in stacks]
        dimensions = None
        for facts in passes:
            if facts.get("remove") == "layers":
                kept = [[own[index] for index in chosen] for own, chosen in zip(kept, facts["kept"], strict=True)]
            elif facts.get("remove") == "hidden":
                own = torch.tensor(facts["dimensions"])
                dimensions = own if dimensions is None else dimensions[own]
        found, first = [], 0
        for layers, depth in zip(kept, stacks, strict=True):
            found += [first + index for index in layers]
            first += depth
        return cls(found, dimensions, tokens)

    @property
    def facts(self) -> dict[str, Any]:
        """Layers, and digests of the dimensions and tokens, JSON-able."""
        cut = {"dimensions": self.dimensions, "tokens": self.tokens}
        digests = {name: digest_of(value) for name, value in cut.items() if value is not None}
        return {"layers": list(self.layers), **digests}

    def asked(self, ids: torch.Tensor) -> torch.Tensor:
        """The teacher's ids of the model's, int64 `[...]`."""
        return ids if self.tokens is None else self.tokens.to(ids.device)[ids]

    def states(self, states: torch.Tensor) -> torch.Tensor:
        """Of the teacher's hidden states `[..., hidden]` those that the model has."""
        return states if self.dimensions is None else states[..., self.dimensions.to(states.device)]

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Of the teacher's logits `[..., vocab]` those of the model's tokens: what it would say if there were no others."""
        return logits if self.tokens is None else logits[..., self.tokens.to(logits.device)]

    def outputs(self, outputs: Outputs) -> Outputs:
        """What the model can be compared with, of what the teacher gave for `asked` ids; its logits are whole."""
        assert outputs.logits is None or isinstance(outputs.logits, torch.Tensor)
        return replace(
            outputs,
            states=[self.states(one) for one in outputs.states],
            logits=None if outputs.logits is None else self.logits(outputs.logits),
            last=None if outputs.last is None else self.states(outputs.last),
        )
