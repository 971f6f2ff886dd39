"""Every combination of the values, the last key fastest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from compress.sweeps.models import Sweep
from compress.sweeps.records import Trial, next_number
from compress.sweeps.space import MOST, text_of
from runtime.errors import RequestError


class Grid:
    """Proposes the points that no trial has had yet; `total` is how many trials there will be."""

    def __init__(self, sweep: Sweep) -> None:
        self.points = list(points(sweep))
        self.total = len(self.points)

    def propose(self, trials: Sequence[Trial]) -> Trial | None:
        """The next trial after `trials`, or None: there are no more."""
        tried = {trial.key for trial in trials}
        values = next((values for values in self.points if text_of(values) not in tried), None)
        return None if values is None else Trial(next_number(trials), values)


def points(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """The values of every point, by dotted keys.

    Raises:
        RequestError: a range without steps, or more points than anybody waits for.
    """
    counts = {}
    for key, values in sweep.vary.items():
        count = values.count()
        if count is None:
            raise RequestError(
                f"vary.{key}: a grid needs a list of values, or a range with a step; a search takes ranges without"
            )
        if getattr(values, "log", False):
            raise RequestError(f"vary.{key}: log says how a search draws; a grid needs a list of values")
        counts[key] = count
    total = math.prod(counts.values())
    if total > MOST:
        most = max(counts, key=lambda key: counts[key])
        raise RequestError(
            f"vary: the grid has {total:,} points ({counts[most]:,} values of {most}); at most {MOST:,} are allowed"
        )
    lists = {key: values.grid() or [] for key, values in sweep.vary.items()}
    return (dict(zip(lists, combination, strict=True)) for combination in itertools.product(*lists.values()))
