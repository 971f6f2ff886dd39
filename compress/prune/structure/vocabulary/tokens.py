"""Cut vocabulary: choice of the tokens that stay, each with all that it is made of, and the files of a checkpoint with their new ids."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress import data as calibration
from compress.core.files import write_json
from compress.data.held_out import calibration_texts
from compress.model.checkpoint_writer import copy_companions
from compress.model.streamed import StreamedModel
from compress.prune.structure import METHODS, StructureConfig
from compress.prune.structure.method import View
from compress.prune.structure.vocabulary.config_ids import renumber_config, renumbered
from compress.prune.structure.vocabulary.vocabulary import FILE, Vocabulary, processed, read_vocabulary
from compress.recipe import Recipe, Stage
from runtime.checkpoint.checkpoint import read_json
from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Vocabularies in formats of other libraries, which tokenizer.json stands for.
_DROPPED = ("*.model", "*.spm", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class Tokens:
    """A cut vocabulary.

    Attributes:
        vocabulary: the whole one.
        new: {id: new id} of the tokens that stay.
    """

    vocabulary: Vocabulary
    new: Mapping[int, int]

    @property
    def kept(self) -> torch.Tensor:
        """int64 `[new size]`: the id that each new one had."""
        return torch.tensor(sorted(self.new, key=lambda old: self.new[old]), dtype=torch.int64)

    def change(self, number: int) -> int:
        """The new id; an id that is no row of the model stays."""
        return self.new[number] if 0 <= number < self.vocabulary.size else number

    def config(self, config: PretrainedConfig, smaller: PretrainedConfig) -> PretrainedConfig:
        """`smaller`, which is `config` but for its sizes, with new ids in the place of those that `config` names."""
        renumber_config(smaller, config, self.change)
        return smaller

    def write(self, directory: Path) -> None:
        """Rewrite the files of a checkpoint that hold ids, except config.json, in place; drop vocabularies in other formats."""
        content = self._tokenizer()
        _write(directory / FILE, content)
        for name in ("generation_config.json", "tokenizer_config.json"):
            if (directory / name).is_file():
                _write(directory / name, self._config(read_json(directory / name)))
        if (directory / "added_tokens.json").is_file():
            found = read_json(directory / "added_tokens.json")
            _write(directory / "added_tokens.json", {token: self.change(number) for token, number in found.items()})
        vocabulary = content["model"]["vocab"]
        if (directory / "vocab.json").is_file():
            _write(directory / "vocab.json", vocabulary)
        if (directory / "vocab.txt").is_file():
            _write_lines(directory / "vocab.txt", sorted(vocabulary, key=lambda token: vocabulary[token]))
        if (directory / "merges.txt").is_file():
            pairs = content["model"]["merges"]
            _write_lines(directory / "merges.txt", ["#version: 0.2", *(" ".join(pair) for pair in pairs)])
        for pattern in _DROPPED:
            for file in directory.glob(pattern):
                file.unlink()

    def _tokenizer(self) -> dict[str, Any]:
        whole, old = self.vocabulary, self.vocabulary.content
        own = {number: new for number, new in self.new.items() if number in whole.model.tokens}
        added = [{**entry, "id": self.change(whole.added[entry["content"]])} for entry in old.get("added_tokens") or []]
        padding = old.get("padding")
        return {
            **old,
            "added_tokens": sorted(added, key=lambda entry: entry["id"]),
            "post_processor": processed(old.get("post_processor"), self.change),
            "padding": None if padding is None else {**padding, "pad_id": self.change(int(padding["pad_id"]))},
            "model": whole.model.without(own),
        }

    def _config(self, values: dict[str, Any]) -> dict[str, Any]:
        result = renumbered(values, self.change)
        decoder = values.get("added_tokens_decoder")
        if decoder is not None:
            result["added_tokens_decoder"] = {str(self.change(int(old))): entry for old, entry in decoder.items()}
        return result


def _write_lines(file: Path, lines: Iterable[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_TEXTS, _CHARACTERS = 64, 4096
"""How much text the new tokenizer is tried on."""


def closed(tokens: Iterable[int], parts: Callable[[int], Iterable[int]], within: set[int] | None = None) -> set[int]:
    """The tokens with all that they are made of, and those parts with theirs; `within`: what is there already is not followed."""
    found: set[int] = set()
    left = list(tokens)
    while left:
        token = left.pop()
        if token not in found and (within is None or token not in within):
            found.add(token)
            left.extend(parts(token))
    return found


def choose(ranked: Sequence[int], keep: int, required: set[int], parts: Callable[[int], Iterable[int]]) -> set[int]:
    """Exactly `keep` tokens.

    Args:
        ranked: all ids, those that matter most first. keep: at least `len(required)` and at most `len(ranked)`.
        required: closed under parts.
    """
    kept = set(required)
    while len(kept) < keep:
        for token in ranked:  # one that was too much with its parts may fit when these are there
            if token in kept:
                continue
            more = closed([token], parts, kept)
            if len(kept) + len(more) <= keep:
                kept |= more
            if len(kept) == keep:
                break
    return kept


def kept_tokens(recipe: Recipe, stage: Stage, streamed: StreamedModel, tokenizer: Any, keep: int) -> Tokens:
    """The vocabulary with `keep` tokens.

    Args:
        tokenizer: the model's, as transformers loads it.

    Raises:
        RequestError: with file and line: a tokenizer that cannot be cut, or tokens that must stay and are too many.
    """
    size = int(streamed.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    config: StructureConfig = stage.config
    path = stage.path
    amount = next(name for name in ("keep", "ratio", "budget") if getattr(config, name) is not None)
    with recipe.origin.located((*path, "remove")):
        vocabulary = read_vocabulary(streamed.checkpoint.path, streamed.config, size)
    batches = calibration.load(recipe.calibration, tokenizer, size).batches
    counts = torch.bincount(torch.cat([ids[mask] for ids, mask in batches]), minlength=size)
    with recipe.origin.located((*path, amount)):
        required = _required(vocabulary, counts, keep)
    view = View(size, keep, torch.Generator().manual_seed(config.seed), occurrences=counts)
    order = METHODS[stage.method].rank(view, config).argsort(descending=True, stable=True).tolist()
    ids = vocabulary.ids
    ranked = [token for token in order if token in ids]
    kept = choose(ranked, min(keep, len({*ids, *required})), required, vocabulary.parts)
    padding = (row for row in order if row not in ids and row not in kept)
    tokens = Tokens(vocabulary, vocabulary.new_ids(kept | set(islice(padding, keep - len(kept)))))
    with recipe.origin.located((*path, "remove")):
        _check_tokenizer(recipe, streamed.checkpoint.path, tokenizer, tokens)
    return tokens


def _required(vocabulary: Vocabulary, counts: torch.Tensor, keep: int) -> set[int]:
    """Tokens that stay whatever their rank, with all that they are made of; RequestError where so few cannot be kept."""
    occurring = set(counts.nonzero().flatten().tolist())
    required = closed(vocabulary.required | occurring, vocabulary.parts)
    special, least = len(vocabulary.special), len(required)
    if keep < min(special, least):
        raise RequestError(
            f"{keep:,} tokens cannot hold the {special:,} special ones, which always stay; the fewest that can be kept are {least:,}"
        )
    if keep < least:
        raise RequestError(
            f"{keep:,} tokens are too few: {len(occurring):,} different ones occur in the calibration text, and with the {special:,} "
            f"special ones, those that any text can be written with, and what they are merged of, {least:,} must stay; keep {least} or more"
        )
    return required


def _check_tokenizer(recipe: Recipe, path: Path, tokenizer: Any, tokens: Tokens) -> None:
    """RequestError where the new tokenizer, loaded as users will, does not read calibration sequences as the old one."""
    from transformers import AutoTokenizer

    which = f"the tokenizer of {path} ({type(tokenizer).__name__})"
    with tempfile.TemporaryDirectory(prefix="compress-tokenizer-") as room:
        directory = Path(room)
        copy_companions(path, directory)
        write_json(directory / "config.json", read_json(path / "config.json"))
        tokens.write(directory)
        try:
            smaller: Any = AutoTokenizer.from_pretrained(room, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"{which} cannot be loaded with fewer tokens: {error}") from error
    for text in _texts(recipe, tokenizer):
        if not _reads_alike(text, tokenizer, smaller, tokens):
            raise RequestError(
                f"{which} reads texts otherwise when tokens are taken out of its tokenizer.json, so its vocabulary cannot be cut; a text "
                f"begins {text[:40]!r}"
            )


def _reads_alike(text: str, tokenizer: Any, smaller: Any, tokens: Tokens) -> bool:
    """The same tokens where all of them stay, else the same text."""
    before, after = (one(text, verbose=False)["input_ids"] for one in (tokenizer, smaller))
    if all(number in tokens.new for number in before):
        return [tokens.new[number] for number in before] == after
    return bool(smaller.decode(after) == tokenizer.decode(before))


def _texts(recipe: Recipe, tokenizer: Any) -> Iterator[str]:
    for one in calibration_texts(recipe.calibration, tokenizer):
        yield from (text[:_CHARACTERS] for text in islice((text for text in one.documents if text.strip()), _TEXTS))
