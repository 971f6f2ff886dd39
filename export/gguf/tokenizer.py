"""Tokenizer of the artifact as GGUF's keys: byte-level BPE ("gpt2") and BPE with byte fallback, as SentencePiece has it ("llama").

Read from what transformers makes of the directory, so that it is the tokenizer which the artifact's user has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.gguf import pretokenizers
from export.source import TOKENIZER_FILES, Source
from export.target import Conversion

if TYPE_CHECKING:
    from gguf import GGUFWriter


SPACE = "▁"


def merge_scores(vocab: Mapping[str, int], merges: Iterable[tuple[str, ...]]) -> tuple[dict[str, float], bool]:
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
    ways = {token: sum((token[:i], token[i:]) in pairs for i in range(1, len(token))) for token in first}
    together = all(last[token] - first[token] + 1 == ways[token] for token in first)
    complete = all(
        (token[:i], token[i:]) in pairs
        for token in vocab
        # not those that only stand for themselves (`<s>`, `<0x0A>`)
        if token in first or not (token.startswith("<") and token.endswith(">"))
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


def flat_steps(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Steps of a normalizer or pre-tokenizer, sequences opened; `inner` is their key for what is in them."""
    if step is None:
        return []
    return [one for part in step[inner] for one in flat_steps(part, inner)] if step["type"] == "Sequence" else [step]


# gguf.TokenType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class UnsupportedError(Exception):
    """GGUF has no word for this tokenizer; the message says why."""


@dataclass
class Vocabulary:
    """What goes into `tokenizer.ggml.*`.

    Attributes:
        keys: {NAME: argument of `GGUFWriter.add_NAME`}, in the file's order.
        remarks: what llama.cpp will do otherwise than transformers.
        composed: transformers composes characters first (NFC), llama.cpp does not.
    """

    keys: dict[str, Any]
    remarks: list[str]
    composed: bool = False


def load(source: Source) -> Any:
    """transformers' tokenizer of the artifact; None where it has none.

    Raises:
        UnsupportedError: there are tokenizer files that transformers cannot read, or that are no "fast" tokenizer.
    """
    from transformers import AutoTokenizer

    there = [name for name in TOKENIZER_FILES if (Path(source.path) / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model"} & set(there):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.path), trust_remote_code=source.trust_remote_code)
    except Exception as error:
        raise UnsupportedError(f"transformers cannot load its tokenizer ({', '.join(there)}): {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UnsupportedError(f"its tokenizer has no tokenizer.json (found {', '.join(there)})")
    return tokenizer


def read(source: Source) -> Vocabulary | None:
    """The vocabulary to write; None where the artifact has no tokenizer.

    Raises:
        UnsupportedError: llama.cpp has no tokenizer that does the same.
    """
    tokenizer = load(source)
    if tokenizer is None:
        return None
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, size = content["model"], int(source.config.vocab_size)
    if model["type"] != "BPE":
        raise UnsupportedError(f"its tokenizer is {model['type']}, not byte-level BPE or BPE with byte fallback")
    if _byte_levels(content):
        vocabulary = _gpt2(content, size)
    elif model.get("byte_fallback"):
        vocabulary = _llama(content, size)
    else:
        raise UnsupportedError("its tokenizer is BPE neither of bytes nor with byte fallback")
    beyond = sorted(index for index in tokenizer.get_vocab().values() if index >= size)
    if beyond:
        what = f"{len(beyond)} tokens from id {beyond[0]} on are left out: the embedding has {size} rows"
        vocabulary.remarks.append(what)
    _add_special(vocabulary, source, tokenizer)
    return vocabulary


def conversions(vocabulary: Vocabulary | None) -> list[Conversion]:
    """Where texts could become other tokens than in transformers."""
    none = ["no tokenizer is written (no_vocab): prompts and answers are token ids"]
    remarks = none if vocabulary is None else vocabulary.remarks
    return [Conversion(remark, ("tokenizer",), bytes=0) for remark in remarks]


def write(writer: GGUFWriter, vocabulary: Vocabulary | None) -> None:
    """All keys of the tokenizer."""
    for name, value in ({"tokenizer_model": "no_vocab"} if vocabulary is None else vocabulary.keys).items():
        getattr(writer, f"add_{name}")(value)


def _byte_levels(content: dict[str, Any]) -> list[Mapping[str, Any]]:
    """Pre-tokenizers of bytes."""
    steps = flat_steps(content.get("pre_tokenizer"), "pretokenizers")
    return [step for step in steps if step["type"] == "ByteLevel"]


def _gpt2(content: dict[str, Any], size: int) -> Vocabulary:
    remarks: list[str] = []
    name, how = pretokenizers.identify(content)
    if how is not None:
        remarks.append(how if name else f"{how}: llama.cpp's default is written, texts can become other tokens")
    normalizer = ", ".join(step["type"] for step in flat_steps(content.get("normalizer"), "normalizers"))
    if normalizer:
        remarks.append(
            f"the normalizer {normalizer} is left out, llama.cpp has none: text that it would change gets other tokens"
        )
    if any(step.get("add_prefix_space") for step in _byte_levels(content)):
        remarks.append(
            "no space is put before a text (add_prefix_space), llama.cpp has no such step for BPE: begin prompts with one"
        )
    tokens, types = _tokens(content, size)
    # llama.cpp wants merges and the package writes no empty list: here one whose parts nothing ever makes.
    merges = [" ".join(pair) for pair in content["model"]["merges"]] or ["ĠĠ ĠĠ"]
    keys = {"tokenizer_model": "gpt2", "tokenizer_pre": name or "default", "token_list": tokens, "token_types": types}
    return Vocabulary(keys | {"token_merges": merges}, remarks, normalizer == "NFC")


def _llama(content: dict[str, Any], size: int) -> Vocabulary:
    remarks: list[str] = []
    tokens, types = _tokens(content, size)
    found, faithful = merge_scores(content["model"]["vocab"], map(tuple, content["model"]["merges"]))
    if not faithful:
        remarks.append(
            "its merges are not those of a SentencePiece vocabulary (a token for every merge and a merge for every way to split it): "
            "texts can become other tokens"
        )
    prefix, unknown = space_prefix(content)
    if unknown:
        remarks.append(
            f"{', '.join(unknown)} of its tokenizer is left out, llama.cpp has none: texts can become other tokens"
        )
    scores = [found.get(token, 0.0) for token in tokens]
    keys = {"tokenizer_model": "llama", "tokenizer_pre": "default", "token_list": tokens, "token_types": types}
    return Vocabulary(keys | {"token_scores": scores, "add_space_prefix": prefix}, remarks)


def _tokens(content: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Text and type of every row of the embedding; rows without a token are called `[PADn]`."""
    model = content["model"]
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for text, index in model["vocab"].items():
        if index < size:
            tokens[index], types[index] = text, NORMAL
            if model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                types[index] = BYTE
            elif text == model.get("unk_token"):
                types[index] = UNKNOWN
    for added in content.get("added_tokens", ()):
        index = added["id"]
        if index < size:
            # llama.cpp looks for added tokens in the text before spaces become "▁".
            spaced = not added["special"] and model.get("byte_fallback")
            tokens[index] = added["content"].replace("▁", " ") if spaced else added["content"]
            if types[index] != UNKNOWN:
                types[index] = CONTROL if added["special"] else USER_DEFINED
    if len(set(tokens)) != size:
        twice = next(token for i, token in enumerate(tokens) if tokens.index(token) != i)
        raise UnsupportedError(f"its vocabulary has the token {twice!r} twice, which llama.cpp does not load")
    return tokens, types


def _add_special(vocabulary: Vocabulary, source: Source, tokenizer: Any) -> None:
    keys, ends = vocabulary.keys, _ends(source)
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(ends), None)
    rest = [token for token in ends if token != eos]
    found = {
        "bos": tokenizer.bos_token_id if tokenizer.bos_token_id is not None else source.config.bos_token_id,
        "eos": eos, "eot": rest[0] if rest else None, "eom": rest[1] if len(rest) > 1 else None,
        "unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id,
    }  # fmt: skip
    size = len(keys["token_list"])
    keys |= {f"{name}_token_id": int(t) for name, t in found.items() if t is not None and 0 <= t < size}
    if len(rest) > 2:
        vocabulary.remarks.append(f"GGUF has room for three tokens that end a text; {rest[2:]} are not among them")
    bare, full = tokenizer.encode("a b", add_special_tokens=False), tokenizer.encode("a b")
    bos, final = keys.get("bos_token_id"), keys.get("eos_token_id")
    add_bos = full != bare and bool(full) and full[0] == bos
    add_eos = full != bare and bool(full) and full[-1] == final
    keys |= {"add_bos_token": add_bos, "add_eos_token": add_eos}
    if [*[bos] * add_bos, *bare, *[final] * add_eos] != full:
        vocabulary.remarks.append(
            "its tokenizer adds other tokens around a text than bos and eos; llama.cpp adds only those"
        )
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template and isinstance(template, str):
        keys["chat_template"] = template


def _ends(source: Source) -> list[int]:
    """Token ids that end a text, by generation_config.json, else config.json."""
    file = source.path / "generation_config.json"
    given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    if given is None:
        given = source.config.eos_token_id
    return [] if given is None else [int(t) for t in (given if isinstance(given, list) else [given])]
