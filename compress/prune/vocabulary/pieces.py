"""What the kinds of subword models have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Pieces(ABC):
    """The `model` of a tokenizer.json.

    Args:
        model: its content.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.model = model
        self.vocabulary = self._vocabulary()
        self.tokens = {number: token for token, number in self.vocabulary.items()}

    @abstractmethod
    def _vocabulary(self) -> dict[str, int]:
        """{token: id}."""

    @property
    @abstractmethod
    def unknown(self) -> int | None:
        """The id that stands for what cannot be written, if there is one."""

    def parts(self, token: int) -> tuple[int, ...]:
        """The tokens that this one is made of when a text is read; none: it is found in one step."""
        return ()

    @abstractmethod
    def without(self, new: Mapping[int, int]) -> dict[str, Any]:
        """The model with fewer tokens, given {id: new id} of those that stay; the new ids are the first integers."""

    def core(self, token: str) -> str:
        """A token without marks of where in a word it stands."""
        return token

    def base(self) -> set[int]:
        """The tokens without which some texts could not be written any more.

        With a token for every byte these are enough. Else they are the single characters, and all tokens with a character that is no token
        by itself.
        """
        bytes_ = {f"<0x{value:02X}>" for value in range(256)}
        if self.model.get("byte_fallback") and bytes_ <= self.vocabulary.keys():
            return {self.vocabulary[token] for token in bytes_}
        cores = {number: self.core(token) for token, number in self.vocabulary.items()}
        single = {core for core in cores.values() if len(core) == 1}
        return {number for number, core in cores.items() if len(core) <= 1 or not single.issuperset(core)}
