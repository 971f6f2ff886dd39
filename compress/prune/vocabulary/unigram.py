"""Unigram: the most likely way to write a text, each token having a probability (Kudo, 2018, arXiv 1804.10959)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.prune.vocabulary.pieces import Pieces


class Unigram(Pieces):
    """A text whose tokens all stay is read as before: of fewer ways to write it the most likely is still the same."""

    def _vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for number, (token, _) in enumerate(self.model["vocab"]):
            found.setdefault(token, number)
        return found

    @property
    def unknown(self) -> int | None:
        number = self.model.get("unk_id")
        return None if number is None else int(number)

    def without(self, new: Mapping[int, int]) -> dict[str, Any]:
        order = sorted(new, key=lambda old: new[old])
        unknown = None if self.unknown is None else new[self.unknown]
        return {**self.model, "vocab": [self.model["vocab"][old] for old in order], "unk_id": unknown}
