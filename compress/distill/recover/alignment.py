"""Counterparts of the teacher's layers, hidden dimensions and tokens in a student that other stages have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from compress.distill.recover.outputs import Outputs
from compress.distill.train.data import digest_of
from compress.rotate import hidden_matrix


@dataclass(frozen=True)
class Alignment:
    """Layers, hidden dimensions and tokens of the teacher that the model still has, in the model's order.

    Attributes:
        layers: the numbers of the teacher's blocks, over all stacks, whose hidden states are compared.
        dimensions: int64 `[n]`, of the teacher's hidden state; None: all.
        tokens: int64 `[vocab]`, the teacher's ids of the model's tokens; None: all, as they are.
        matrix: float32 `[n, hidden]`, that those dimensions were multiplied by when the hidden state was rotated; None: they were not.
    """

    layers: Sequence[int] = ()
    dimensions: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    matrix: torch.Tensor | None = None

    @classmethod
    def of(cls, stacks: Sequence[int], passes: Sequence[Mapping[str, Any]], tokens: torch.Tensor | None) -> Alignment:
        """The alignment of a model that earlier stages have pruned or rotated.

        Args:
            stacks: number of layers of each stack of the teacher. passes: records of the stages that changed it, in order.
            tokens: see the attribute.
        """
        kept = [list(range(depth)) for depth in stacks]
        dimensions = matrix = None
        for facts in passes:
            if facts.get("remove") == "layers":
                kept = [[own[index] for index in chosen] for own, chosen in zip(kept, facts["kept"], strict=True)]
            elif facts.get("remove") == "hidden":
                own = torch.tensor(facts["dimensions"])
                if matrix is not None:
                    matrix = matrix[:, own]
                else:
                    dimensions = own if dimensions is None else dimensions[own]
            elif facts.get("rotate") and facts["matrix"] is not None:
                rotation = hidden_matrix(facts["rotate"], facts["matrix"]).float()
                matrix = rotation if matrix is None else matrix @ rotation
        found, first = [], 0
        for layers, depth in zip(kept, stacks, strict=True):
            found += [first + index for index in layers]
            first += depth
        return cls(found, dimensions, tokens, matrix)

    @property
    def facts(self) -> dict[str, Any]:
        """Layers, and digests of the dimensions and tokens, JSON-able."""
        cut = {"dimensions": self.dimensions, "tokens": self.tokens, "matrix": self.matrix}
        digests = {name: digest_of(value) for name, value in cut.items() if value is not None}
        return {"layers": list(self.layers), **digests}

    def asked(self, ids: torch.Tensor) -> torch.Tensor:
        """The teacher's ids of the model's, int64 `[...]`."""
        return ids if self.tokens is None else self.tokens.to(ids.device)[ids]

    def states(self, states: torch.Tensor) -> torch.Tensor:
        """The teacher's hidden states `[..., hidden]` as the model has them, in their dtype."""
        if self.dimensions is not None:
            states = states[..., self.dimensions.to(states.device)]
        return states if self.matrix is None else (states.float() @ self.matrix.to(states.device)).to(states.dtype)

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
