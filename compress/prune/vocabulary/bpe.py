"""Byte-pair encoding: tokens are merged of two others, in the order of a list (Sennrich et al., 2016, arXiv 1508.07909)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

from compress.prune.vocabulary.pieces import Pieces


class BPE(Pieces):
    """A text whose tokens all stay is read as before: of the merges that it took none is missing, so that at every step the first merge of
    the list that can be applied is the same."""

    def _vocabulary(self) -> dict[str, int]:
        return dict(self.model["vocab"])

    @property
    def unknown(self) -> int | None:
        token = self.model.get("unk_token")
        return None if token is None else self.vocabulary.get(token)

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        """{(left, right): place in the list}."""
        pairs = (tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in self.model["merges"])
        return {(left, right): place for place, (left, right) in enumerate(pairs)}

    @cached_property
    def _made_of(self) -> dict[str, list[tuple[str, str]]]:
        """The merges that give each token."""
        found: dict[str, list[tuple[str, str]]] = {}
        for pair in self._ranks:
            found.setdefault(self._merged(*pair), []).append(pair)
        return found

    def parts(self, token: int) -> tuple[int, ...]:
        """The two that are merged last. Of several pairs that could be, the one that reading the token's own text comes to."""
        text = self.tokens[token]
        pairs = self._made_of.get(text, [])
        pair = pairs[0] if len(pairs) == 1 else self._last_merge(text) if pairs else None
        return () if pair is None else tuple(self.vocabulary[part] for part in pair if part in self.vocabulary)

    def without(self, new: Mapping[int, int]) -> dict[str, Any]:
        vocabulary = {self.tokens[old]: number for old, number in sorted(new.items(), key=lambda pair: pair[1])}
        merges = [
            [left, right]
            for left, right in self._ranks
            if left in vocabulary and right in vocabulary and self._merged(left, right) in vocabulary
        ]
        return {**self.model, "vocab": vocabulary, "merges": merges}

    def core(self, token: str) -> str:
        return token.removeprefix(self._prefix).removesuffix(self._suffix)

    @property
    def _prefix(self) -> str:
        return self.model.get("continuing_subword_prefix") or ""

    @property
    def _suffix(self) -> str:
        return self.model.get("end_of_word_suffix") or ""

    def _merged(self, left: str, right: str) -> str:
        return left + right.removeprefix(self._prefix)

    def _last_merge(self, text: str) -> tuple[str, str] | None:
        """The merge that completes a token; None: its text is read as several."""
        units = self._units(text)
        last = None
        while len(units) > 1:
            pairs = [(self._ranks.get(pair), place) for place, pair in enumerate(pairwise(units))]
            possible = [(rank, place) for rank, place in pairs if rank is not None]
            if not possible:
                return None
            _, place = min(possible)
            last = (units[place], units[place + 1])
            units[place : place + 2] = [self._merged(*last)]
        return last

    def _units(self, text: str) -> list[str]:
        """What a token's text begins as: its characters, with the marks that they have."""
        inside = text.removesuffix(self._suffix)
        first = inside.startswith(self._prefix)
        units = [self._prefix + char for char in inside.removeprefix(self._prefix)]
        if units and not first:
            units[0] = units[0].removeprefix(self._prefix)
        if units and inside != text:
            units[-1] += self._suffix
        return units
