"""Vocabulary of a checkpoint, as its tokenizer.json says it, checked against the model; its subword model (BPE, WordPiece, Unigram)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from compress.prune.structure.vocabulary.config_ids import collect_ids, named
from runtime.checkpoint.checkpoint import read_json
from runtime.config.messages import listing
from runtime.errors import RequestError

FILE = "tokenizer.json"


# What tokens are made of, and the model with fewer of them.


class SubwordModel:
    """The `model` of a tokenizer.json.

    Args:
        model: its content.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.model = model
        self.vocabulary = self._vocabulary()
        self.tokens = {number: token for token, number in self.vocabulary.items()}
        self.prefix: str = model.get("continuing_subword_prefix") or ""

    def _vocabulary(self) -> dict[str, int]:
        """{token: id}."""
        return dict(self.model["vocab"])

    @property
    def unknown(self) -> int | None:
        """The id that stands for what cannot be written, if there is one."""
        token = self.model.get("unk_token")
        return None if token is None else self.vocabulary.get(token)

    def parts(self, token: int) -> tuple[int, ...]:
        """The tokens that this one is made of when a text is read; none: it is found in one step."""
        return ()

    def without(self, new: Mapping[int, int]) -> dict[str, Any]:
        """The model with fewer tokens, given {id: new id} of those that stay; the new ids are the first integers."""
        return {**self.model, "vocab": {self.tokens[old]: new[old] for old in sorted(new, key=lambda old: new[old])}}

    def core(self, token: str) -> str:
        """A token without marks of where in a word it stands."""
        return token.removeprefix(self.prefix)

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


class BPE(SubwordModel):
    """Byte-pair encoding: tokens are merged of two others, in the order of a list (Sennrich et al., 2016, arXiv 1508.07909).

    A text whose tokens all stay is read as before: of the merges that it took none is missing, so that at every step the first merge of
    the list that can be applied is the same.
    """

    @property
    def _suffix(self) -> str:
        return self.model.get("end_of_word_suffix") or ""

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
        """See `SubwordModel.without`; merges of and to tokens that go are gone too."""
        model = super().without(new)
        merges = (pair for pair in self._ranks if {*pair, self._merged(*pair)} <= model["vocab"].keys())
        return {**model, "merges": [list(pair) for pair in merges]}

    def core(self, token: str) -> str:
        """See `SubwordModel.core`."""
        return super().core(token).removesuffix(self._suffix)

    def _merged(self, left: str, right: str) -> str:
        return left + right.removeprefix(self.prefix)

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
        first = inside.startswith(self.prefix)
        units = [self.prefix + char for char in inside.removeprefix(self.prefix)]
        if units and not first:
            units[0] = units[0].removeprefix(self.prefix)
        if units and inside != text:
            units[-1] += self._suffix
        return units


class Unigram(SubwordModel):
    """The most likely way to write a text, each token having a probability (Kudo, 2018, arXiv 1804.10959).

    A text whose tokens all stay is read as before: of fewer ways to write it the most likely is still the same.
    """

    def _vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for number, (token, _) in enumerate(self.model["vocab"]):
            found.setdefault(token, number)
        return found

    @property
    def unknown(self) -> int | None:
        """See `SubwordModel.unknown`."""
        number = self.model.get("unk_id")
        return None if number is None else int(number)

    def without(self, new: Mapping[int, int]) -> dict[str, Any]:
        """See `SubwordModel.without`."""
        order = sorted(new, key=lambda old: new[old])
        unknown = None if self.unknown is None else new[self.unknown]
        return {**self.model, "vocab": [self.model["vocab"][old] for old in order], "unk_id": unknown}


class WordPiece(SubwordModel):
    """At every place of a word the longest token that fits (Schuster and Nakajima, 2012).

    A word whose tokens all stay is read as before: of fewer tokens the longest is still the same.
    """

    def base(self) -> set[int]:
        """A character must be there for the beginning of a word and for its rest; where it is not, tokens that have it stay."""
        prefix = self.prefix
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


KINDS: dict[str, type[SubwordModel]] = {"BPE": BPE, "WordPiece": WordPiece, "Unigram": Unigram}


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a checkpoint.

    Attributes:
        content: of tokenizer.json. model: its subword model.
        added: {token: id} of tokens that are matched before the subword model runs; some are the model's too.
        size: rows of the model's embeddings; ids without a token are padding.
        special: ids that the tokenizer or a config names.
    """

    content: dict[str, Any]
    model: SubwordModel
    added: dict[str, int]
    size: int
    special: frozenset[int]

    @property
    def ids(self) -> set[int]:
        """Ids of all tokens."""
        return {*self.model.tokens, *self.added.values()}

    @property
    def required(self) -> set[int]:
        """Tokens that always stay: special ones, and those without which some texts could not be written."""
        return {*self.special, *self.model.base()}

    def parts(self, token: int) -> tuple[int, ...]:
        """See `SubwordModel.parts`; special tokens are not put together."""
        return () if token in self.special or token not in self.model.tokens else self.model.parts(token)

    def new_ids(self, kept: set[int]) -> dict[int, int]:
        """{id: new id}: tokens of the model in their order, then added ones, then padding, as tokenizers number them."""
        added = set(self.added.values()) - self.model.tokens.keys()
        order = sorted(kept, key=lambda old: (old not in self.model.tokens, old not in added, old))
        return {old: new for new, old in enumerate(order)}


def read_vocabulary(path: Path, config: Any, size: int) -> Vocabulary:
    """The vocabulary of the checkpoint in a directory.

    Args:
        config: of the model, with its defaults. size: rows of its embeddings.

    Raises:
        RequestError: a tokenizer that cannot be cut.
    """
    from tokenizers import Tokenizer

    file = path / FILE
    if not file.is_file():
        raise RequestError(f"{path} has no {FILE}, and the vocabulary is cut there")
    content = read_json(file)
    kind = (content.get("model") or {}).get("type")
    if kind not in KINDS:
        raise RequestError(f"{file} is a tokenizer of kind {kind}; those of kind {listing(KINDS)} can be cut")
    model = KINDS[kind](content["model"])
    loaded = Tokenizer.from_str(json.dumps(content))
    numbers = {entry["content"]: loaded.token_to_id(entry["content"]) for entry in content.get("added_tokens") or []}
    added = {token: number for token, number in numbers.items() if number is not None}
    largest = max({*model.tokens, *added.values()}, default=-1)
    if largest >= size:
        raise RequestError(
            f"{file} has a token with id {largest}, and the model a vocabulary of {size}: they do not match"
        )
    special = {*added.values(), *_named(path, config, size)}
    special |= collect_ids(lambda change: processed(content.get("post_processor"), change))
    special |= {int(content["padding"]["pad_id"])} if content.get("padding") else set()
    special |= set() if model.unknown is None else {model.unknown}
    return Vocabulary(content, model, added, size, frozenset(special))


def _named(path: Path, config: Any, size: int) -> set[int]:
    """Ids that the checkpoint's files name."""
    found = named(config.to_dict(), size)
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (path / name).is_file():
            found |= named(read_json(path / name), size)
    return found


_PROCESSORS = ("TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel", "Sequence")


def processed(processor: Any, change: Any) -> Any:
    """A post-processor with other ids; RequestError where its kind is unknown, and so where its ids are."""
    if processor is None:
        return None
    if processor["type"] not in _PROCESSORS:
        raise RequestError(f"{FILE} has a post-processor of kind {processor['type']}, whose ids cannot be changed here")
    result = dict(processor)
    if processor["type"] == "Sequence":
        result["processors"] = [processed(inner, change) for inner in processor["processors"]]
    if processor["type"] == "TemplateProcessing":
        result["special_tokens"] = {
            name: {**token, "ids": [change(number) for number in token["ids"]]}
            for name, token in processor["special_tokens"].items()
        }
    for key in ("sep", "cls"):
        if key in processor:
            result[key] = [processor[key][0], change(processor[key][1])]
    return result
