"""Streaming detokenizer and stop strings: tokens to text while they arrive."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

# Stop strings, which may begin in one token and end in another: thousands of them cost what a few do.


class StopStrings:
    """Stop strings made ready for searching: once a request, shared by all its sequences.

    Memory is that of the strings, and getting ready is one sort, so that ten thousand of them take milliseconds.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.all = frozenset(stops)
        self.first = frozenset(stop[0] for stop in self.all)
        self._sorted = sorted(self.all)
        self._lengths: dict[str, list[int]] = {}  # last character -> lengths of the stops that end in it, longest first
        for last, length in sorted({(stop[-1], -len(stop)) for stop in self.all}):
            self._lengths.setdefault(last, []).append(-length)

    def begins(self, text: str) -> bool:
        """Whether a stop string begins with `text` (or is it)."""
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)

    def ending(self, text: str) -> int:
        """Length of the longest stop string that `text` ends with; 0 when there is none."""
        for length in self._lengths.get(text[-1], ()):
            if length <= len(text) and text[-length:] in self.all:
                return length
        return 0


class StopMatcher:
    """Finds the first stop string in a text that arrives in parts of any size.

    The result depends on the text alone, not on the parts: the stop that is completed first wins, the longest of those
    completed by the same character.

    What is pending is the longest end of the text that begins a stop string. Any stop string that a next character completes
    lies within it and that character, so every character is looked at a constant number of times.
    """

    def __init__(self, stops: StopStrings | Sequence[str]) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._pending = ""
        self.found = False

    def push(self, part: str) -> str:
        """Text that certainly belongs to no stop string; sets `found` when one is complete (the text ends before it)."""
        stops = self._stops
        if not self._pending and stops.first.isdisjoint(part):
            return part
        text = self._pending + part
        begin = 0
        for end in range(len(self._pending) + 1, len(text) + 1):
            while begin < end and not stops.begins(text[begin:end]):
                begin += 1
            if begin < end and (length := stops.ending(text[begin:end])):
                self.found = True
                self._pending = ""
                return text[: end - length]
        self._pending = text[begin:]
        return text[:begin]

    def finish(self) -> str:
        """The beginning of a stop string that was never completed is ordinary text."""
        text, self._pending = self._pending, ""
        return text


__all__ = ["REPLACEMENT", "Detokenizer", "StopMatcher"]

REPLACEMENT = "\ufffd"
# An unfinished UTF-8 character is at most three bytes, each of which a tokenizer may show as one replacement character.
LONGEST_UNFINISHED = 3
PATIENCE = 8  # tokens; what is still unreadable then is no text, and all but its end is given out
CONTEXT_TOKENS = 8


class Detokenizer:
    """Turns a growing list of token ids into parts of text that are final.

    Decoding a token alone is wrong for tokenizers where spaces or bytes depend on the neighbours, and decoding everything
    each time is quadratic. So a short window is decoded: some tokens whose text is already out, and the new ones. Trailing
    replacement characters wait, since the next token may complete the character.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: ids before the first new token; they are context and give no text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = list(prompt[-CONTEXT_TOKENS:])
        self._start = 0  # where the window begins
        self._read = len(self._ids)  # the window's text is out up to here
        self._emitted = len(self._decode(0))  # characters of the window that are out

    def push(self, token: int) -> str:
        """The text that is certain after one more token; it may be empty."""
        self._ids.append(token)
        text = self._decode(self._start)
        waiting = len(text) - len(text.rstrip(REPLACEMENT))
        if waiting and len(self._ids) - self._read <= PATIENCE:
            # Llama 2's byte fallback decodes a run of byte tokens as a whole: the first byte of a character makes the
            # finished characters before it unreadable too, until it is complete.
            final = text[: text.index(REPLACEMENT)]
        else:
            final = text[: len(text) - min(waiting, LONGEST_UNFINISHED)]
        part = final[self._emitted :]
        self._emitted = max(self._emitted, len(final))
        if waiting == 0 and part:
            # Slide: the tokens since the last slide become the context of the next ones.
            self._start, self._read = self._read, len(self._ids)
            self._emitted = len(self._decode(self._start))
        return part

    def finish(self) -> str:
        """What still waits: an unfinished character is shown as it stands."""
        text = self._decode(self._start)
        part = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return part

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
