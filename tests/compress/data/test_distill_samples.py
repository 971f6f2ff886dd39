"""The samples that acceptance is reported on: what the rows are for tokenizers with and without BOS, with and without a chat template."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from compress.data.samples import KINDS, LENGTH, MOST, read, sample_rows, turns
from compress.evaluate import drafters

BUNDLED = Path(__file__).resolve().parents[3] / "recipes" / "checkpoints" / "stdlib-4m"
SPECIAL = ["<s>", "</s>", "<user>", "<assistant>"]
BOS, EOS, USER, ASSISTANT = range(256, 260)
PREAMBLE = "You are a helpful assistant."
TEMPLATE = (
    "{{ bos_token }}" + PREAMBLE + "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)  # fmt: skip


def make_tokenizer(bos: bool = False, template: Any = None) -> Any:
    """One token a byte, and those of a dialogue; optionally BOS is put before a text, as Llama's tokenizer does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def bundled() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED)


# -------------------------------------------------------------------- the texts
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_long_enough(kind: str) -> None:
    text = read(kind)
    assert 9_000 <= len(text.encode()) <= 11_000
    assert text.endswith("\n")
    assert "\r" not in text
    assert "\t" not in text
    paragraphs = text.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs) >= 20


def test_code_is_of_several_languages_and_most_of_it_of_python() -> None:
    python = 0
    for piece in read("code").split("\n\n\n"):
        try:
            ast.parse(piece)
        except SyntaxError:
            continue
        python += len(piece)
    assert 0.5 < python / len(read("code")) < 0.9
    for sign in ("#include <", "export async function", "CREATE TABLE", "#!/usr/bin/env bash", '"version": "'):
        assert sign in read("code")


def test_turns_are_those_of_user_and_assistant_in_turn() -> None:
    dialogue = turns()
    assert len(dialogue) >= 40
    assert [turn["role"] for turn in dialogue] == ["user", "assistant"] * (len(dialogue) // 2)
    assert all(turn["content"] and turn["content"] == turn["content"].strip() for turn in dialogue)
    assert any("\n\n" in turn["content"] for turn in dialogue)  # a turn may have several paragraphs
    names = {"user": "User", "assistant": "Assistant"}
    lines = [line for turn in dialogue for line in f"{names[turn['role']]}: {turn['content']}".splitlines() if line]
    assert lines == [line for line in read("chat").splitlines() if line]  # nothing is lost


# -------------------------------------------------------------------- rows
TOKENIZERS = {
    "bytes": make_tokenizer,
    "bytes with BOS": lambda: make_tokenizer(bos=True),
    "bytes with a template": lambda: make_tokenizer(template=TEMPLATE),
    "bytes with both": lambda: make_tokenizer(bos=True, template=TEMPLATE),
    "bundled": bundled,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_rows_are_bounded_and_distinct_and_of_every_kind(name: str) -> None:
    found = sample_rows(TOKENIZERS[name]())
    assert list(found) == list(KINDS)
    for rows in found.values():
        assert rows.dtype == torch.int64
        assert rows.shape == (MOST, LENGTH)
    together = torch.cat(list(found.values()))
    assert len(together.unique(dim=0)) == len(together)
    starts = together[:, : LENGTH // 2]  # what is continued
    assert len(starts.unique(dim=0)) == len(starts)


@pytest.mark.parametrize("most", [1, 3, MOST])
def test_rows_are_spread_over_the_whole_of_a_sample_in_its_order(most: int) -> None:
    tokenizer = make_tokenizer()
    for kind, rows in sample_rows(tokenizer, most=most).items():
        whole = read(kind).encode()
        assert len(rows) == most
        places = [
            whole.find(tokenizer.decode(row).encode().strip("\N{REPLACEMENT CHARACTER}".encode())) for row in rows
        ]
        assert min(places) >= 0
        steps = [after - before for before, after in itertools.pairwise([*places, len(whole)])]
        assert min(steps) >= LENGTH
        assert max(steps) <= len(whole) / most + 2 * LENGTH


def test_few_tokens_give_all_rows_and_fewer_than_two_give_none() -> None:
    class Words:
        """A token for every so many words."""

        bos_token_id = None

        def __init__(self, words: int) -> None:
            self.words = words

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": list(range(len(text.split()) // self.words))}

    words = {kind: len(read(kind).split()) for kind in KINDS}
    found = sample_rows(Words(2))
    assert {kind: rows.flatten().tolist() for kind, rows in found.items()} == {
        kind: list(range(count // 2 // LENGTH * LENGTH)) for kind, count in words.items()
    }
    assert sample_rows(Words(20)) == {}


def test_rows_begin_with_bos_where_the_tokenizer_adds_it() -> None:
    plain, marked = sample_rows(make_tokenizer(), longest=15), sample_rows(make_tokenizer(bos=True), longest=16)
    for kind in KINDS:
        assert not (plain[kind] == BOS).any()
        assert (marked[kind][:, 0] == BOS).all()
        assert torch.equal(marked[kind][:, 1:], plain[kind])
    assert not any((rows == bundled().bos_token_id).any() for rows in sample_rows(bundled()).values())


# -------------------------------------------------------------------- chat templates
def test_conversation_is_written_by_the_chat_template() -> None:
    tokenizer = make_tokenizer(bos=True, template=TEMPLATE)
    found, plain = sample_rows(tokenizer, most=10_000), sample_rows(make_tokenizer(bos=True), most=10_000)
    assert torch.equal(found["text"], plain["text"])
    assert torch.equal(found["code"], plain["code"])
    rows = found["chat"]
    assert (rows[:, 0] == BOS).all()
    assert not (rows[:, 1:] == BOS).any()  # that of the template is not a second one
    ids = rows[:, 1:].flatten()
    text = tokenizer.apply_chat_template(turns(), tokenize=False)
    assert text.startswith("<s>" + tokenizer.decode(ids))
    assert not text.endswith("<assistant>")
    told = ids[(ids == USER) | (ids == ASSISTANT)]
    assert told.tolist() == ([USER, ASSISTANT] * len(turns()))[: len(told)]
    assert len(told) >= len(turns()) - 2  # all but what the last row leaves over
    assert text.count(PREAMBLE) == 1
    assert "User: " not in tokenizer.decode(ids)


def test_a_template_may_write_a_bos_that_the_tokenizer_does_not_add() -> None:
    rows = sample_rows(make_tokenizer(template=TEMPLATE))["chat"]
    assert (rows == BOS).nonzero().tolist() == [[0, 0]]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only with a system prompt') }}",
        "{% for m in messages %}{{ m['content']['missing']['text'] }}{% endfor %}",
        "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}",
        "{{ messages[-1]['content'] }}",
    ],
    ids=["raises", "fails", "content in parts", "the last turn only"],
)
def test_a_template_that_is_not_for_turns_of_text_is_not_used(template: str) -> None:
    found, plain = sample_rows(make_tokenizer(template=template)), sample_rows(make_tokenizer())
    assert all(torch.equal(found[kind], plain[kind]) for kind in KINDS)


# -------------------------------------------------------------------- who reads them
@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompts_of_the_comparison_of_drafters(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    found = drafters.prompts_of(tokenizer, None, None, 16)
    assert list(found) == [*KINDS, "edit"]
    rows = sample_rows(tokenizer, most=8)
    for kind in KINDS:
        assert found[kind] == rows[kind].tolist()
    for code, again in zip(found["code"], found["edit"], strict=True):
        assert again[:LENGTH] == code
        assert again[-LENGTH // 4 :] == code[: LENGTH // 4]
    short = drafters.prompts_of(tokenizer, None, 40, 16)
    assert {kind: {len(ids) for ids in rows} for kind, rows in short.items()} == {kind: {24} for kind in KINDS}
