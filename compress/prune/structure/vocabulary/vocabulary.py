"""Vocabulary of a checkpoint, as its tokenizer.json says it, checked against the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.prune.structure.vocabulary.config_ids import collect_ids, named
from compress.prune.structure.vocabulary.subword_models import BPE, SubwordModel, Unigram, WordPiece
from runtime.checkpoint.checkpoint import read_json
from runtime.config.messages import listing
from runtime.errors import RequestError

FILE = "tokenizer.json"
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
