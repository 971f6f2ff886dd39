"""Target distributions at the nodes of one tree, with the options of the call applied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.sampling.options import GenerationOptions
from runtime.sampling.sampling import check_numbers, next_tokens, process
from runtime.sampling.tree import ROOT


class TargetLogits:
    """The target's logits after a sequence and after each node of a tree that may follow it.

    Args:
        logits: float32 `[1 + nodes, vocab]`, the first row is the root's.
        options: of the call.
        generator: the sequence's random numbers; None: greedy.
        seen: bool `[vocab]`, tokens of the sequence, for the repetition penalty; None without one.
        greedy: the most likely token of every row, where somebody knows them already (no penalty).
    """

    def __init__(
        self,
        logits: torch.Tensor,
        options: GenerationOptions,
        generator: torch.Generator | None = None,
        seen: torch.Tensor | None = None,
        greedy: Sequence[int] | None = None,
    ) -> None:
        self._logits, self._options, self._seen, self._greedy = logits, options, seen, greedy
        self.generator = generator

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, not the most likely ones taken."""
        return self.generator is not None

    def choose(self, node: int, branch: Sequence[int] = ()) -> int:
        """The token that plain decoding would write after this node (or `ROOT`), whose branch has these tokens.

        Where tokens are drawn it takes one random number, as plain decoding does: a sequence whose tokens are all chosen here is the one
        that plain decoding writes with the same seed.
        """
        row = node - ROOT
        if self._greedy is not None:
            return self._greedy[row]
        sources = [] if self.generator is None else [self.generator]
        return int(next_tokens(self._logits[row : row + 1], self._after(branch), self._options, sources))

    def distribution(self, node: int, branch: Sequence[int] = (), temperature: float | None = None) -> torch.Tensor:
        """Probabilities after this node, float64 `[vocab]` on the CPU, as plain decoding would draw from.

        Args:
            temperature: another than that of the call (which is 0 where nothing is drawn).
        """
        options = self._options
        if temperature is not None:
            options = GenerationOptions(temperature=temperature, repetition_penalty=options.repetition_penalty)
        row = node - ROOT
        own = self._logits[row : row + 1]
        check_numbers(own)
        logits = process(own, self._after(branch), options)
        return torch.softmax(logits[0].double(), -1).cpu()

    def uniform(self) -> float:
        """A number in [0, 1) of the sequence's."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))

    def _after(self, branch: Sequence[int]) -> torch.Tensor | None:
        if self._seen is None:
            return None
        seen = self._seen
        if branch:
            seen = seen.clone()
            seen[torch.tensor(list(branch), device=seen.device)] = True
        return seen[None]
