"""BPE with byte fallback as SentencePiece knows it: a score a token instead of a list of merges.

llama.cpp's "llama" tokenizer joins the two neighbours whose union is the token of the highest score (the leftmost at a tie);
tokenizer.json joins the two neighbours that come first in its merges. The two agree where tokenizer.json was made from a
SentencePiece vocabulary: every way to split a token into two tokens is a merge, and merges of one token lie together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SPACE = "▁"


def scores(vocab: Mapping[str, int], merges: Iterable[tuple[str, ...]]) -> tuple[dict[str, float], bool]:
    """({token that merges make: minus its place}, whether the scores say exactly what the merges say)."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    pairs: set[tuple[str, ...]] = set()
    for rank, pair in enumerate(merges):
        if len(pair) != 2:
            return {}, False
        token = pair[0] + pair[1]
        first.setdefault(token, rank)
        last[token] = rank
        pairs.add(pair)
    together = all(last[token] - first[token] + 1 == _ways(token, pairs) for token in first)
    complete = all(
        (token[:i], token[i:]) in pairs
        for token in vocab
        if token in first or _mergeable(token)
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    )
    faithful = together and complete and first.keys() <= vocab.keys()
    return {token: -float(rank) for token, rank in first.items()}, faithful


def space_prefix(content: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """(whether a text gets a space in front, steps that are neither that nor spaces becoming "▁")."""
    prefix, unknown = False, []
    for step in flat_steps(content.get("normalizer"), "normalizers"):
        if step["type"] == "Prepend" and step.get("prepend") == SPACE:
            prefix = True
        elif step != {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}:
            unknown.append(step["type"])
    for step in flat_steps(content.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace" and step.get("replacement") == SPACE:
            prefix = prefix or step.get("prepend_scheme", "always") != "never"
        else:
            unknown.append(step["type"])
    return prefix, unknown


def _ways(token: str, pairs: set[tuple[str, ...]]) -> int:
    return sum((token[:i], token[i:]) in pairs for i in range(1, len(token)))


def _mergeable(token: str) -> bool:
    """Not one of the tokens that only stand for themselves (`<s>`, `<0x0A>`)."""
    return len(token) > 1 and not (token.startswith("<") and token.endswith(">"))


def flat_steps(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Steps of a normalizer or pre-tokenizer, sequences opened; `inner` is their key for what is in them."""
    if step is None:
        return []
    return [one for part in step[inner] for one in flat_steps(part, inner)] if step["type"] == "Sequence" else [step]
