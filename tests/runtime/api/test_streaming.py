"""Text that arrives in pieces: unfinished characters, stop strings, and which tokens belong to the output."""

from __future__ import annotations

import random

import pytest
from tiny_models import tokenizer

from runtime.sampling.output import SequenceOutput
from runtime.sampling.text import REPLACEMENT, Detokenizer, StopMatcher

TEXTS = [
    "plain ascii text, with spaces  and\nnewlines\n\n",
    "Grüße, naïve café, 東京の夜, 🙂🚀👩‍👩‍👧 done",
    "🙂",
    "a\u0301 combining, \u200b zero width, \ufeff mark",
]


def pieces(ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer(), prompt)
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "Once upon a time there was a small cat. ", "夜"])
def test_pieces_make_up_the_text(text: str, prompt: str) -> None:
    encode = tokenizer().encode
    ids = encode(text)
    result = pieces(ids, encode(prompt))
    assert "".join(result) == text
    assert not any(REPLACEMENT in piece for piece in result)


def test_text_comes_out_as_soon_as_it_is_certain() -> None:
    ids = tokenizer().encode("cat🙂x")
    result = pieces(ids, [])
    assert len(ids) > 4
    assert result[0] == "cat"[: len(result[0])] != ""
    assert "🙂" in result  # all of it in one piece, with the token that completes it
    assert result[-2].endswith("x")


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_give_what_decoding_all_of_them_gives(seed: int) -> None:
    """Random tokens are mostly invalid UTF-8."""
    chance = random.Random(seed)
    ids = [chance.randrange(2, 400) for _ in range(120)]
    assert "".join(pieces(ids, [])) == tokenizer().decode(ids, clean_up_tokenization_spaces=False)


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    ids = tokenizer().encode("a東")[:-1]
    assert tokenizer().decode(ids).endswith(REPLACEMENT)
    assert "".join(pieces(ids, [])) == tokenizer().decode(ids)


def test_special_tokens_give_no_text() -> None:
    encode = tokenizer().encode
    assert "".join(pieces([*encode("one"), 0, *encode(" two"), 1], [0])) == "one two"


def sentencepiece() -> object:
    """A tokenizer like Llama 2's: words carry their leading space, other characters fall back to bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "▁Once", "▁upon", "▁a", "▁time", "s", *(f"<0x{b:02X}>" for b in range(256))]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_leading_spaces_survive_where_decoding_alone_would_lose_them() -> None:
    llama2 = sentencepiece()
    smile = [6 + byte for byte in "é🙂東".encode()]
    detokenizer = Detokenizer(llama2, [1])
    result = [detokenizer.push(token) for token in (2, 3, *smile, 4, 5)] + [detokenizer.finish()]
    assert result == [" upon", " a", "", "é", "", "", "", "🙂", "", "", "東", " time", "s", ""]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello world", ["wor"], "hello "),
        ("hello world", ["xyz"], "hello world"),
        ("aaab", ["aab"], "a"),
        ("abcabd", ["abd"], "abc"),
        ("abc", ["b", "abc"], "a"),  # b is complete first
        ("xabc", ["abc", "bc"], "x"),  # complete with the same character: the longer one
        ("ab", ["abc"], "ab"),  # never completed
        ("end.\n\nmore", ["\n\n", "."], "end"),
        ("🙂x🚀", ["x🚀"], "🙂"),
        ("stop", ["stop"], ""),
    ],
)
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str], expected: str) -> None:
    chance = random.Random(0)
    for size in [1, 2, 3, len(text), *(None for _ in range(20))]:
        matcher, result, rest = StopMatcher(stops), "", text
        while rest and not matcher.found:
            cut = size or chance.randint(1, len(text))
            result += matcher.push(rest[:cut])
            assert expected.startswith(result)
            rest = rest[cut:]
        if not matcher.found:
            result += matcher.finish()
        assert result == expected
        assert matcher.found == (expected != text)


def run(text: str, stops: tuple[str, ...] = (), limit: int = 1000, eos: bool = False) -> SequenceOutput:
    ids = tokenizer().encode(text) + ([1] if eos else [])
    output = SequenceOutput([0], limit, {1}, tokenizer(), stops)
    seen_text, seen_tokens = "", []
    for token in ids:
        if output.finished:
            break
        output.push(token)
        assert output.text.startswith(seen_text)  # what was said to be certain stays
        assert output.tokens[: len(seen_tokens)] == seen_tokens
        seen_text, seen_tokens = output.text, list(output.tokens)
    return output


def test_the_end_of_a_sequence() -> None:
    ended = run("one two", eos=True)
    assert (ended.finish_reason, ended.text) == ("eos", "one two")
    assert ended.tokens == [*tokenizer().encode("one two"), 1]
    cut = run("one two three four", limit=3)
    assert cut.finish_reason == "length"
    assert len(cut.tokens) == 3
    assert tokenizer().decode(cut.tokens) == cut.text
    running = run("one two")
    assert running.finish_reason is None


def test_tokens_that_touch_a_stop_string_are_dropped() -> None:
    text = "one 🙂STOP two"
    output = run(text, ("🙂ST",))
    assert (output.finish_reason, output.text) == ("stop", "one ")
    assert tokenizer().decode(output.tokens) == "one "[: len(tokenizer().decode(output.tokens))]
    full = tokenizer().encode(text)
    assert full[: len(output.tokens)] == output.tokens
    assert output.produced > len(output.tokens)


def test_a_held_back_beginning_of_a_stop_string_is_released_at_the_end() -> None:
    output = run("one two STO", ("STOP",), eos=True)
    assert (output.finish_reason, output.text) == ("eos", "one two STO")
    assert output.tokens == [*tokenizer().encode("one two STO"), 1]


def test_a_stop_string_completed_by_the_last_allowed_token_wins() -> None:
    text = "one two"
    output = run(text, ("two",), limit=len(tokenizer().encode(text)))
    assert (output.finish_reason, output.text) == ("stop", "one ")
