"""Output of one sequence so far, and its end."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from runtime.sampling.text import Detokenizer, StopMatcher, StopStrings


@contextmanager
def reporting(progress: bool | Callable[[int, int], Any], total: int) -> Iterator[Callable[[int], None]]:
    """A function that is told how many of `total` prompts are finished; it passes on what changed, 0 at the start included."""
    if progress is False:
        yield lambda done: None
        return
    if progress is True:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        columns = ("generate", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    show, last = progress, 0

    def report(done: int) -> None:
        nonlocal last
        if done != last:
            last = done
            show(done, total)

    show(0, total)
    yield report


FinishReason = Literal["length", "eos", "stop", "cancelled"]


class SequenceOutput:
    """Collects the tokens of one sequence; decides when it ends.

    Attributes:
        tokens: the new token ids that are certain to be part of the output. An end-of-sequence token is included, as in
            transformers; tokens that touch a stop string are not.
        text: the new text that is certain to be part of the output (empty when no tokenizer is given).
        finish_reason: why the sequence ended; None while it runs.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        eos: Collection[int] = (),
        tokenizer: Any = None,
        stops: StopStrings | Sequence[str] = (),
    ) -> None:
        self._given = (prompt, max_new_tokens, eos, tokenizer, stops)
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._all: list[int] = []
        self._limit = max_new_tokens
        self._eos = frozenset(eos)
        self._detokenizer = Detokenizer(tokenizer, prompt) if tokenizer is not None else None
        self._stops = StopMatcher(stops)
        self._length = 0  # characters that the tokens have given, pending ones included
        self._ends: list[int] = []  # for the first tokens: where in the text each one ends

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        """Ids generated so far; with a detokenizer, those whose text is out (all when it ended other than by a stop)."""
        if self._detokenizer is None or (self.finished and self.finish_reason != "stop"):
            return self._all
        return self._all[: bisect.bisect_right(self._ends, len(self.text))]

    @property
    def produced(self) -> int:
        """How many tokens were decoded, those dropped because of a stop string included."""
        return len(self._all)

    @property
    def left(self) -> int:
        """How many more tokens it takes at most."""
        return 0 if self.finished else self._limit - len(self._all)

    def push(self, token: int) -> None:
        """One more token from the model."""
        self._all.append(token)
        ended = token in self._eos
        if self._detokenizer is not None and not ended:
            self._add(self._detokenizer.push(token))
        if self.finished:
            return
        if ended or len(self._all) >= self._limit:
            self.end("eos" if ended else "length")

    def end(self, reason: FinishReason) -> None:
        """No more tokens come: what was withheld of the text is given out."""
        if self._detokenizer is not None:
            self._add(self._detokenizer.finish())
        if not self.finished:
            self.text += self._stops.finish()
            self.finish_reason = reason

    def replay(self, tokens: Sequence[int]) -> None:
        """Become the output of these tokens, whatever it was: an interrupt may have left it in the middle of one."""
        fresh = SequenceOutput(*self._given)
        for token in tokens:
            fresh.push(token)
        self.__dict__.update(fresh.__dict__)

    def _add(self, part: str) -> None:
        if not part:
            return
        self._length += len(part)
        # Tokens that gave no text yet (parts of one character) end where the text they waited for ends.
        self._ends += [self._length] * (len(self._all) - len(self._ends))
        self.text += self._stops.push(part)
        if self._stops.found:
            self.finish_reason = "stop"
