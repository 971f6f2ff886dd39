"""Interface of an acceptance rule. One file a rule in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from runtime.config.settings import Settings
from runtime.drafting.verify.target import TargetLogits
from runtime.sampling.tree import ROOT, Tree


class Verdict(NamedTuple):
    """`path`: nodes that are accepted, from the root down; `token`: what the target writes after them."""

    path: list[int]
    token: int


class Rule(Settings):
    """Decides how much of a tree is accepted.

    Attributes:
        name: as `acceptance=` says it.
        lossless: whether what is written is distributed as plain decoding would write it (greedy: the same tokens).
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False

    def accept(self, tree: Tree, target: TargetLogits) -> Verdict:
        """Walk down from the root while a child is accepted."""
        children, node = tree.children(), ROOT
        path: list[int] = []
        branch: list[int] = []
        while True:
            chosen, token = self.step(tree, node, children.get(node, ()), branch, target)
            if chosen is None:
                return Verdict(path, token)
            path.append(chosen)
            branch.append(token)
            node = chosen

    def step(
        self, tree: Tree, node: int, options: Sequence[int], branch: Sequence[int], target: TargetLogits
    ) -> tuple[int | None, int]:
        """The child that is accepted, or None, and the token that is written in either case.

        Args:
            node: where the walk is, or `ROOT`.
            options: its children.
            branch: tokens from the root to `node`.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """In a few words, for `Model.stats`."""
        return self.name if self.lossless else f"{self.name} (lossy)"
