"""Occurrences of n-grams in a growing list of tokens, and the history of earlier outputs."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15 | 1  # of the polynomial; odd, so that no token's part of a hash is lost
_SPREAD = 0xD6E8FEB86659FD93  # tokens are small: their parts must reach the high bits, which are what is used
_FIRST_BITS = 10
_BULK = 256  # from so many tokens on numpy is quicker than a loop


class Match(NamedTuple):
    """An end of a sequence that occurred before: its length in tokens, and where (index of its last token), the latest first."""

    length: int
    places: list[int]


class Occurrences:
    """Of each position and each of some lengths, where the n-gram that ends there occurred last before.

    Hash chains, as compressors keep them (deflate, RFC 1951, section 4): a table of heads by hash, and from each position a link to
    the one before it of the same hash. So a token costs one link and one head a length, however long the sequence is, and
    n-grams that occur often cost no more than others. What a chain says is compared with the tokens, so hashes that collide cost only
    time.

    Args:
        tokens: the list; it may grow at its end, and `catch_up` reads on from where it stopped.
        lengths: of the n-grams, ascending.
    """

    def __init__(self, tokens: list[int], lengths: Sequence[int]) -> None:
        self.tokens = tokens
        self.lengths = tuple(lengths)
        # What the token that leaves a window of each length weighs in its hash.
        self._leaving = [_SPREAD * pow(_BASE, length, 1 << 64) & _MASK for length in self.lengths]
        self._begin(_FIRST_BITS)
        self.catch_up()

    def _begin(self, bits: int) -> None:
        """Read from the start, with tables of 2^bits heads."""
        self.seen, self._bits = 0, bits
        self._hashes = [0] * len(self.lengths)
        self._links = [array("i") for _ in self.lengths]
        self._heads = [array("i", b"\xff" * (4 << bits)) for _ in self.lengths]

    @property
    def memory_bytes(self) -> int:
        """Of tables and links; not of the tokens."""
        return sum(sys.getsizeof(part) for part in (*self._links, *self._heads))

    # ---------------------------------------------------------------- reading on
    def follow(self, tokens: list[int]) -> None:
        """Read on in this list, which begins with what was read: the same one, or a copy."""
        self.tokens = tokens
        self.catch_up()

    def catch_up(self) -> None:
        """Index the tokens that were added."""
        if len(self.tokens) > 1 << self._bits:
            # As many heads as tokens at least, so that chains are about as long as n-grams are frequent.
            self._begin(len(self.tokens).bit_length() + 1)
        new = len(self.tokens) - self.seen
        if new >= _BULK:
            self._read_many()
        else:
            for _ in range(new):
                self._read_one()

    def _read_one(self) -> None:
        tokens, place, shift = self.tokens, self.seen, 64 - self._bits
        part = tokens[place] * _SPREAD
        hashes = self._hashes
        for level, length in enumerate(self.lengths):
            value = hashes[level] * _BASE + part
            if place >= length:
                value -= tokens[place - length] * self._leaving[level]
            value &= _MASK
            hashes[level] = value
            if place + 1 < length:
                self._links[level].append(-1)
                continue
            heads, slot = self._heads[level], value >> shift
            self._links[level].append(heads[slot])
            heads[slot] = place
        self.seen = place + 1

    def _read_many(self) -> None:
        first, count = self.seen, len(self.tokens)
        longest = self.lengths[-1]
        start = max(0, first - longest + 1)
        parts = np.array(self.tokens[start:], dtype=np.uint64) * np.uint64(_SPREAD)
        values = parts.copy()
        length, base = 1, np.uint64(_BASE)
        for level, wanted in enumerate(self.lengths):
            while length < wanted:
                # In place it would read what it has just written.
                values[1:] = parts[1:] + base * values[:-1]
                length += 1
            self._hashes[level] = int(values[-1])
            begin = max(first, wanted - 1)
            slots = (values[begin - start :] >> np.uint64(64 - self._bits)).astype(np.int64)
            links = np.full(count - first, -1, dtype=np.int32)
            self._link(level, slots, begin, links[begin - first :])
            self._links[level].frombytes(links.tobytes())
        self.seen = count

    def _link(self, level: int, slots: np.ndarray, begin: int, links: np.ndarray) -> None:
        """Links of positions from `begin` on, and the heads after them."""
        if not len(slots):
            return
        heads = np.frombuffer(self._heads[level], dtype=np.int32)
        order = np.sort((slots << 32) | np.arange(len(slots)))
        slots, places = order >> 32, (order & 0xFFFFFFFF).astype(np.int32)
        again = np.empty(len(slots), dtype=bool)  # not the first of its hash
        again[0] = False
        np.equal(slots[1:], slots[:-1], out=again[1:])
        before = np.empty(len(slots), dtype=np.int32)
        before[1:] = places[:-1] + begin
        before[~again] = heads[slots[~again]]
        links[places] = before
        last = np.append(~again[1:], True)
        heads[slots[last]] = places[last] + begin

    # ---------------------------------------------------------------- looking up
    def match(self, most: int, ending: Occurrences | None = None) -> Match:
        """The longest end of this list that occurred before in it, of lengths from the first to the last of `lengths`.

        Args:
            most: occurrences that are looked at of an n-gram, the latest ones. Where there are more of one of the indexed lengths, and
                none of the next, an older one may agree for longer.
            ending: another list, of the same lengths, whose end is to be found in this one.
        """
        for level in range(len(self.lengths) - 1, -1, -1):
            found = self._walk(level, most, ending)
            if found.places:
                return found
        return Match(0, [])

    def places(self, level: int, most: int, ending: Occurrences | None = None) -> list[int]:
        """The latest occurrences of the last `lengths[level]` tokens, but for these themselves; `ending` as of `match`."""
        length, tail = self.lengths[level], (ending or self).tokens
        if length > len(tail):
            return []
        if ending is None:
            place = self._links[level][-1]
        else:
            place = self._heads[level][ending._hashes[level] >> (64 - self._bits)]
        if place < 0:
            return []
        links, tokens, wanted = self._links[level], self.tokens, tail[-length:]
        places: list[int] = []
        # Chains of hashes that collide are short; the bound is for sequences made to collide.
        for _ in range(4 * most):
            if place < 0 or len(places) == most:
                break
            if tokens[place - length + 1 : place + 1] == wanted:
                places.append(place)
            place = links[place]
        return places

    def agreement(self, place: int, known: int, most: int) -> int:
        """How many tokens up to `place` are those of this list's end, at most `most`; `known` of them are so already."""
        tokens, count, end = self.tokens, known, len(self.tokens) - 1
        most = min(most, place + 1)
        while count < most and tokens[place - count] == tokens[end - count]:
            count += 1
        return count

    def _walk(self, level: int, most: int, ending: Occurrences | None) -> Match:
        """The longest match from this indexed length to below the next."""
        length, places = self.lengths[level], self.places(level, most, ending)
        if not places or level + 1 == len(self.lengths):
            return Match(length, places)
        tail = (ending or self).tokens
        # None agrees over the next indexed length, but some may over one in between.
        for longer in range(length + 1, min(self.lengths[level + 1], len(tail) + 1)):
            token, back = tail[-longer], longer - 1
            agreeing = [place for place in places if place >= back and self.tokens[place - back] == token]
            if not agreeing:
                break
            length, places = longer, agreeing
        return Match(length, places)


#: Between two outputs, and equal to no token, so that nothing is found or copied across.
BORDER = (1 << 31) - 1


class History:
    """Outputs one after another.

    Args:
        window: most tokens; when there are more the older half goes. Below 4 there is no history.
        lengths: of n-grams that are indexed; sequences that look something up have the same.
    """

    def __init__(self, window: int, lengths: Sequence[int]) -> None:
        self._window, self._lengths = window, tuple(lengths)
        self.clear()

    def clear(self) -> None:
        """Forget all of it."""
        self.index = Occurrences([], self._lengths)

    def __len__(self) -> int:
        return len(self.index.tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """One more output. Of one that is longer than half the window its end is kept."""
        half = self._window // 2
        if half < 2:
            return
        new = [*tokens[-(half - 1) :], BORDER]
        if len(self) + len(new) > self._window:
            self.index = Occurrences(self.index.tokens[-half:], self._lengths)
        self.index.tokens += new
        self.index.catch_up()

    @property
    def memory_bytes(self) -> int:
        """Estimated memory of the tokens and their index, bytes."""
        # A list's entry, and the number it points to: other lists mostly share it, but not after their end.
        return self.index.memory_bytes + 40 * len(self)
