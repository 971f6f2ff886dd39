"""Progress of a generation: a bar on stderr, or a function of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def reporting(progress: bool | Callable[[int, int], Any], total: int) -> Iterator[Callable[[int], None]]:
    """A function that is told how many of `total` prompts are finished; it passes on what changed, 0 at the start included."""
    if progress is False:
        yield lambda done: None
        return
    last = -1

    def report(done: int) -> None:
        nonlocal last
        if done != last:
            last = done
            show(done, total)

    if callable(progress):
        show = progress
        report(0)
        yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = ("generate", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)

        def show(done: int, _: int) -> None:
            bar.update(task, completed=done)

        report(0)
        yield report
