"""Calibration of routed experts: the tokens that each reads, and the treatment of experts that read too few."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import nn

from compress.core.file_matrix import in_memory
from compress.core.processes import Team
from compress.core.progress import Reporter
from compress.core.statistics import Statistics
from compress.model.input_statistics import Forwards, InputGroup, Original, collect
from compress.recipe.models import ExpertsConfig
from runtime.errors import CompressError
from runtime.modeling.experts import Experts, expert_of

#: Bytes of the second moments that are collected in one pass over the text, where experts have one matrix each.
AT_ONCE = 2**30


@dataclass
class ExpertCalibration:
    """The experts of one block.

    Args:
        block, prefix, share, place: see `compress.weights.block.BlockJob`.

    Attributes:
        nearest: {layer: tokens} of the layers (names inside the block) that the recipe wants rounded to nearest.
        shared: {layer: tokens} of those that were calibrated on all tokens instead.
    """

    block: nn.Module
    prefix: str
    config: ExpertsConfig
    team: Team = field(default_factory=Team)
    place: Callable[[int], Path | None] = in_memory
    nearest: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._homes = {name: module for name, module in self.block.named_modules() if isinstance(module, Experts)}
        for experts in self._homes.values():
            experts.everyone = set(range(experts.count)) if self.config.tokens == "all" else set()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Every expert runs, each on a tensor of its own unless the recipe gives all of them all tokens."""
        before = {name: experts.everyone for name, experts in self._homes.items()}
        for experts in self._homes.values():
            experts.everyone, experts.separate = set(range(experts.count)), self.config.tokens == "routed"
        try:
            yield
        finally:
            for name, experts in self._homes.items():
                experts.everyone, experts.separate = before[name], False

    def finish(self, reporter: Reporter | None = None) -> None:
        """Back to how the layers run; `reporter` is warned where experts were starved."""
        for experts in self._homes.values():
            experts.everyone = set()
        if reporter is None:
            return
        for found, what in (
            (self.shared, "calibrated on all tokens of their layer"),
            (self.nearest, "rounded to nearest"),
        ):
            starved = {expert_of(self.block, name) for name in found}
            if starved:
                total = sum(experts.count for experts in self._homes.values())
                reporter.warn(
                    f"{self.prefix.rstrip('.')}: {len(starved)} of {total} experts read fewer than {self.config.at_least} tokens of the "
                    f"calibration text (the least: {min(found.values())}); they were {what}"
                )

    # ------------------------------------------------------------ statistics
    def waves(self, groups: Sequence[InputGroup]) -> list[list[int]]:
        """Numbers of the groups that can be collected in one pass: one after the other, or the same layers of many experts."""
        found: dict[tuple[str, ...], list[int]] = {}
        for number, group in enumerate(groups):
            place = expert_of(self.block, group.members[0])
            leaf = group.members[0].rpartition(".")[2]
            key = (str(number),) if place is None else (place[0], "out" if leaf == "down_proj" else "in")
            found.setdefault(key, []).append(number)
        return [part for wave in found.values() for part in _parts(wave, groups)]

    def collect(
        self,
        groups: list[InputGroup],
        forwards: Forwards,
        needs: Collection[str],
        original: Original | None = None,
    ) -> list[Statistics]:
        """Statistics of groups, with what the recipe wants for experts that read too little; arguments as of `collect`."""
        alone = all(expert_of(self.block, group.members[0]) is None for group in groups)
        collected = partial(
            collect, self.block, forwards=forwards, needs=needs, team=self.team, place=self.place, original=original
        )
        found = dict(enumerate(collected(groups, stop_early=alone)))
        starved = [
            number
            for number, group in enumerate(groups)
            if found[number].tokens < self.config.at_least and expert_of(self.block, group.members[0]) is not None
        ]
        fresh = [n for n in starved if self._settle(groups[n], found[n].tokens)]
        if fresh:
            for number in fresh:  # what takes its place is collected in the memory that this frees
                del found[number]
            found |= zip(fresh, collected([groups[n] for n in fresh], stop_early=False), strict=True)
        return [found[number] for number in range(len(groups))]

    def _settle(self, group: InputGroup, tokens: int) -> bool:
        """Note a starved group; whether it is to be collected again."""
        place = expert_of(self.block, group.members[0])
        assert place is not None
        experts = self._homes[place[0]]
        if place[1] in experts.everyone:  # it has read all there is
            return False
        if self.config.starved == "fail":
            raise CompressError(
                f"{self.prefix}{place[0]}: expert {place[1]} read {tokens} tokens of the calibration text, fewer than "
                f"{self.config.at_least}; give more text (calibration.samples), or set calibration.experts.starved or .tokens"
            )
        if self.config.starved == "nearest":
            self.nearest |= dict.fromkeys(group.members, tokens)
            return False
        self.shared |= dict.fromkeys(self._layers(place), tokens)
        experts.everyone = experts.everyone | {place[1]}
        return True

    def _layers(self, place: tuple[str, int]) -> list[str]:
        home, number = place
        return [f"{home}.{number}.{projection}" for projection in self._homes[home].layout.projections]


def _parts(wave: list[int], groups: Sequence[InputGroup]) -> list[list[int]]:
    """A wave in parts whose second moments fit in `AT_ONCE` bytes, at least one group each."""
    each = max(1, AT_ONCE // (4 * groups[wave[0]].in_features ** 2))
    return [wave[start : start + each] for start in range(0, len(wave), each)]
