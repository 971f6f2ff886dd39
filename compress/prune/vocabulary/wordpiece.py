"""WordPiece: at every place of a word the longest token that fits (Schuster and Nakajima, 2012)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.prune.vocabulary.pieces import Pieces


class WordPiece(Pieces):
    """A word whose tokens all stay is read as before: of fewer tokens the longest is still the same."""

    def _vocabulary(self) -> dict[str, int]:
        return dict(self.model["vocab"])

    @property
    def unknown(self) -> int | None:
        return self.vocabulary.get(self.model["unk_token"])

    def without(self, new: Mapping[int, int]) -> dict[str, Any]:
        vocabulary = {self.tokens[old]: number for old, number in sorted(new.items(), key=lambda pair: pair[1])}
        return {**self.model, "vocab": vocabulary}

    def core(self, token: str) -> str:
        return token.removeprefix(self.model.get("continuing_subword_prefix") or "")

    def base(self) -> set[int]:
        """A character must be there for the beginning of a word and for its rest; where it is not, tokens that have it stay."""
        prefix = self.model.get("continuing_subword_prefix") or ""
        first = {token for token in self.vocabulary if len(token) == 1}
        rest = {token.removeprefix(prefix) for token in self.vocabulary if token.startswith(prefix)}
        rest = {core for core in rest if len(core) == 1}
        found = set()
        for token, number in self.vocabulary.items():
            core, inside = self.core(token), token.startswith(prefix)
            begins = core[:1] in (rest if inside else first)
            if len(core) <= 1 or not (begins and rest.issuperset(core[1:])):
                found.add(number)
        return found
