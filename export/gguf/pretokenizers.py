"""Pre-tokenizers of llama.cpp, by name, and the one that a tokenizer.json means.

A GGUF file carries only a name (`tokenizer.ggml.pre`); the regular expressions are compiled into llama.cpp (`llama-vocab.cpp`,
`llm_tokenizer_bpe`). Written here as tokenizer.json has them.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_END}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_END}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_PATHS}|{_END}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PATHS}|{_END}"
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _END,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")

GPT2 = "gpt2"  # step: the regular expression that ByteLevel brings along
DIGIT = "digit"  # step: every digit alone


@dataclass(frozen=True)
class Known:
    """One of llama.cpp's pre-tokenizers.

    Attributes:
        name: `tokenizer.ggml.pre`.
        steps: regular expressions, `GPT2`, `DIGIT`.
        ignore_merges: a word that is a token as it stands is not merged.
        ascii: llama.cpp's own expression does the same for ASCII only (it has no classes of case and marks for other letters).
    """

    name: str
    steps: tuple[str, ...]
    ignore_merges: bool = False
    ascii: bool = False


KNOWN = (
    Known("gpt-2", (GPT2,)),
    Known("smollm", (DIGIT, GPT2)),
    Known("llama-bpe", (_LLAMA3,), True),
    Known("smaug-bpe", (_LLAMA3,)),
    Known("qwen2", (_QWEN2,)),
    Known("qwen35", (_QWEN35,)),
    Known("tekken", (_TEKKEN,), True, ascii=True),
    Known("gpt-4o", (_GPT4O,), ascii=True),
    Known("seed-coder", (_SEED,)),
    Known("deepseek-v3", _DEEPSEEK3),
    Known("deepseek-coder", _DEEPSEEK_CODER),
)

# Letters of several scripts and cases, digits in rows, contractions, signs, code, white space of all kinds, no newline at the end.
EVERYTHING = (
    "The quick brown fox, it's I'll WE'VE don't Don'T o'clock 'tis; HTTPServer camelCase snake_case x1y22z333 a4444b55555\n"
    "0 12 345 6789 12345 1234567 3.14159 1,000,000 1e-9 0xFF ½ ² Ⅷ ٣٤٥ १२३\n\n\n"
    "  two   three    four\t\ttabs \t mixed \r\n\r\n  \n   trailing   \n"
    "def f(a, b=[1, 2]):\n    return a[0]->b::c != d // e /* f */ #include <x.h> {{}} ((())) ... !!! ?? -- == ==> && || $9.99 100%\n"
    "https://example.com/a/b?c=d&e=f#g user@example.com C:\\dir\\file.txt ~/.rc @name #tag\n"
    "Ünïcödé naïve Straße ÀÉÎ ﬁ Ǆ İstanbul ß ς Привет, мир! ЁЖ Καλημέρα κόσμε 你好，世界。漢字かなカナ混じり 한국어 텍스트\n"
    "مرحبا بالعالم ۱۲۳ שלום עולם नमस्ते दुनिया สวัสดี ชาวโลก e\u0301 n\u0303 \u200d\u200b 👍🏽 👨‍👩‍👧 🇩🇪 ∑∫√≠ “quoted” ‘single’ – — …"
)


_ASCII = "llama.cpp's {} cuts words with marks or capitals beyond ASCII otherwise than transformers: such texts can become other tokens"


def steps_of(pre: dict[str, Any] | None) -> tuple[str, ...]:
    """What a `pre_tokenizer` of tokenizer.json does, in the words of `Known.steps`; unknown steps keep their JSON."""
    if pre is None:
        return ()
    kind = pre["type"]
    if kind == "Sequence":
        return tuple(step for inner in pre["pretokenizers"] for step in steps_of(inner))
    if kind == "ByteLevel":
        return (GPT2,) if pre.get("use_regex", True) else ()
    if kind == "Digits" and pre.get("individual_digits"):
        return (DIGIT,)
    # A pattern that covers everything cuts the same whether its matches or the (empty) rest between them are removed.
    whole = (pre.get("behavior"), bool(pre.get("invert"))) in (("Isolated", False), ("Removed", True))
    if kind == "Split" and whole and "Regex" in pre["pattern"]:
        return (pre["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n"),)
    return (json.dumps(pre, sort_keys=True),)


def identify(tokenizer: dict[str, Any]) -> tuple[str | None, str | None]:
    """(name, None) of the pre-tokenizer that a byte-level tokenizer.json means; (name, remark) where only a comparison of token ids
    tells, or where llama.cpp does it for ASCII only; (None, why) where none of llama.cpp's gives the same ids."""
    steps, ignore = steps_of(tokenizer.get("pre_tokenizer")), bool(tokenizer["model"].get("ignore_merges"))
    for known in KNOWN:
        if known.steps == steps and known.ignore_merges == ignore:
            return known.name, _ASCII.format(known.name) if known.ascii else None
    from tokenizers import Tokenizer

    expected = _ids(Tokenizer.from_str(json.dumps(tokenizer)))
    # The same expression with another treatment of merges first, then the same treatment.
    for known in sorted(KNOWN, key=lambda k: (k.steps != steps, k.ignore_merges != ignore)):
        if _ids(Tokenizer.from_str(json.dumps(_as(tokenizer, known)))) == expected:
            how = f"its pre-tokenizer is none of llama.cpp's by name; {known.name} gives the same ids on a text with everything in it"
            return known.name, how
    why = (
        "its pre-tokenizer is none of llama.cpp's, and none of those gives the same ids on a text with everything in it"
    )
    return None, why


def _ids(tokenizer: Any) -> list[int]:
    return tokenizer.encode(EVERYTHING, add_special_tokens=False).ids


def _as(tokenizer: dict[str, Any], known: Known) -> dict[str, Any]:
    """The same vocabulary and merges behind another pre-tokenizer."""
    result = copy.deepcopy(tokenizer)
    inner: list[dict[str, Any]] = []
    for step in known.steps:
        if step == DIGIT:
            inner.append({"type": "Digits", "individual_digits": True})
        elif step != GPT2:
            inner.append({"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False})
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": GPT2 in known.steps}
    result["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*inner, last]}
    result["model"]["ignore_merges"] = known.ignore_merges
    return result
