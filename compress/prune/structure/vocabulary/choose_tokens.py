"""Choice of the tokens that stay: those that must, then the best ranked, each with all that it is made of."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from compress import data as calibration
from compress.core.files import write_json
from compress.data.documents import documents
from compress.data.tokens import end_of_text
from compress.model.checkpoint_writer import copy_companions
from compress.model.streamed import StreamedModel
from compress.prune.structure import METHODS, StructureConfig
from compress.prune.structure.method import View
from compress.prune.structure.vocabulary.tokens import Tokens
from compress.prune.structure.vocabulary.vocabulary import Vocabulary, read_vocabulary
from compress.recipe import Recipe, Stage
from runtime.checkpoint.checkpoint import read_json
from runtime.errors import RequestError

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
    counts = _occurrences(recipe, tokenizer, size)
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


def _occurrences(recipe: Recipe, tokenizer: Any, size: int) -> torch.Tensor:
    """How often each token is in the rows of the calibration text: int64 `[size]`."""
    data = calibration.load(recipe.calibration, tokenizer, size)
    seen = torch.cat([ids[mask] for ids, mask in data.batches])
    return torch.bincount(seen, minlength=size)


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
            smaller: Any = AutoTokenizer.from_pretrained(room)
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
    found, _ = documents(recipe.calibration, "calibration", end_of_text(tokenizer), not recipe.calibration.packing)
    return (text[:_CHARACTERS] for text in islice((text for text in found if text.strip()), _TEXTS))
