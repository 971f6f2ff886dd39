# ruff: noqa: E501 (a case and its sentence stand in one line)
"""Conversations: written by the model's chat template, with file and line where that cannot be."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from test_calibration import EOS, TOKENIZER, WORDS, make_tokenizer, recipe, rows_of, words

from compress import data
from runtime.errors import RequestError

# Words of the tokenizer stand for marks of turns; `<s>` is a special token that the template writes itself.
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant', 'tool', 'silent') %}{{ raise_exception('no ' + m.role + ' here') }}{% endif %}"
    "{% if m.role != 'silent' %}{{ ' w490 ' if m.role == 'user' else ' w491 ' }}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %} w492 {{ call.function.arguments.text }}{% endfor %}{% endfor %}"
    "{% for tool in tools or [] %} w493{% endfor %}"
)


def chatty(template=TEMPLATE):
    found = make_tokenizer(bos=True)
    found.chat_template = template
    return found


CHATTY = chatty()
TURNS = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
IDS = [1, WORDS + 490, WORDS + 1, WORDS + 2, WORDS + 491, WORDS + 3]


def write(path, rows):
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


SHAPES = {
    "plain": {"messages": TURNS},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}]}, {"role": "assistant", "content": [{"type": "text", "text": "w3"}]}]},
    "share": {"conversations": [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}]},
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_is_what_the_template_writes(tmp_path, shape, suffix):
    path = write(tmp_path / f"chat{suffix}", [SHAPES[shape]] * 3)
    rows, mask, found = rows_of(path, CHATTY, packing=False)
    assert rows.tolist() == [IDS] * 3, "neither BOS nor EOS is added to those of the template"
    assert bool(mask.all())
    assert rows_of(path, CHATTY, sequence_length=18, samples=1)[0].tolist() == [IDS * 3]
    assert "the file chat" in found.description


def test_tools_and_calls(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"text": "w7"}'}}
    turns = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "w9"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (tools, json.dumps(tools)):
        path = write(tmp_path / "chat.jsonl", [{"messages": turns, "tools": given}])
        ids = rows_of(path, CHATTY, packing=False, sequence_length=20)[0][0].tolist()
        assert ids == [*IDS[:5], *(WORDS + n for n in (492, 7, 491, 9, 493))]


def test_text_goes_before_messages_and_a_column_can_be_named(tmp_path):
    path = write(tmp_path / "both.jsonl", [{"text": "w5 w6", "messages": TURNS}])
    assert rows_of(path, TOKENIZER, packing=False)[0].tolist() == [[WORDS + 5, WORDS + 6]]
    assert rows_of(path, CHATTY, packing=False, text_column="messages")[0].tolist() == [IDS]


def test_data_sets_of_the_hub(monkeypatch):
    loaded = types.SimpleNamespace(load_dataset=lambda *a, **k: [{"messages": TURNS}] * 4)
    monkeypatch.setitem(sys.modules, "datasets", loaded)
    assert rows_of("org/set", CHATTY, packing=False)[0].tolist() == [IDS] * 4


def test_conversations_are_held_out_whole(tmp_path):
    turns = [
        [{**TURNS[0], "content": words(8 * n, 4)}, {**TURNS[1], "content": words(8 * n + 4, 4)}] for n in range(40)
    ]
    found = recipe(
        write(tmp_path / "chat.jsonl", [{"messages": one} for one in turns]),
        {"sequence_length": 11},
        sequence_length=11,
        samples=99,
    )
    text = data.load(found.calibration, CHATTY, 503)
    apart = data.load_evaluation(found.evaluate, CHATTY, 503, found.calibration)
    assert apart.ids[:, 0].tolist() == [1] * len(apart.ids), "each of 11 tokens is a row"
    rows = torch.cat([ids for ids, _ in text.batches])
    assert (len(rows), len(apart.ids)) == (30, 10)
    assert not {*map(tuple, rows.tolist())} & {*map(tuple, apart.ids.tolist())}
    named = recipe("bundled", {"data": str(tmp_path / "chat.jsonl"), "sequence_length": 11})
    assert data.load_evaluation(named.evaluate, CHATTY, 503).rows == 40


def test_spans_of_conversations(tmp_path):
    path = write(tmp_path / "chat.jsonl", [{"messages": TURNS}] * 4)
    found = recipe("bundled", {"data": str(path), "sequence_length": 6})
    spans = data.evaluation_spans(found.evaluate, CHATTY, 503, found.calibration)
    assert spans.ids.tolist() == [IDS] * 4
    assert spans.characters.sum(1).tolist() == [len("<s> w490 w1 w2 w491 w3")] * 4


BAD = {
    "no template": (TURNS, None, "line 2 is a conversation, and the model's tokenizer has no chat template"),
    "role": ([{"role": "critic", "content": "w1"}], TEMPLATE, "line 2 is refused by the model's chat template: no critic here (roles: critic)"),
    "left out": ([{"role": "silent", "content": "w1"}], TEMPLATE, "line 2 has the role 'silent', which the model's chat template drops"),
    "broken": (TURNS, "{{ messages[7].content.nope }}", "line 2 is refused by the model's chat template: "),
    "syntax": (TURNS, "{% if %}", "line 2 is refused by the model's chat template: "),
    "empty": ([], TEMPLATE, "line 2 is not a conversation: the list of messages is empty"),
    "texts": (["w1"], TEMPLATE, "line 2 is not a conversation: expected messages with a role and a content, got 'w1'"),
    "no role": ([{"content": "w1"}], TEMPLATE, "line 2 is not a conversation: a message has no role; its keys: content"),
    "odd role": ([{"role": 3, "content": "w1"}], TEMPLATE, "line 2 is not a conversation: a message has no role"),
    "no content": ([{"role": "user"}], TEMPLATE, "line 2 is not a conversation: the content of a message of role 'user' must be text, got nothing"),
    "number": ([{"role": "user", "content": 3}], TEMPLATE, "must be text, got 3"),
    "image": ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], TEMPLATE, "line 2 is not a conversation: a part of a message must be text, got 'image'"),
    "part": ([{"role": "user", "content": [3]}], TEMPLATE, "a part of a message must be text, got 3"),
    "call": ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], TEMPLATE, "line 2 is not a conversation: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_conversations_answer_in_one_sentence(tmp_path, case):
    messages, template, reason = BAD[case]
    path = write(
        tmp_path / "chat.jsonl",
        [{"messages": TURNS} if template == TEMPLATE else {"text": "w1"}, {"messages": messages}],
    )
    if template != TEMPLATE:
        path = write(path, [{"messages": messages}])
        reason = reason.replace("line 2", "line 1")
    with pytest.raises(RequestError) as caught:
        rows_of(path, chatty(template), packing=False)
    assert str(caught.value).startswith(f"recipe: calibration.data: '{path}' ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert EOS == 0


@pytest.mark.parametrize(("row", "reason"), [
    ({"messages": "w1"}, None), ({"messages": 3}, "has int under 'messages' where a text, or a list of messages, is expected"),
    ({"messages": None}, "has NoneType under 'messages'"), ({"message": TURNS}, "has no column 'text'"),
    ({"messages": TURNS, "tools": "{"}, "is not a conversation: "),
])  # fmt: skip
def test_rows_that_are_something_else(tmp_path, row, reason):
    path = write(tmp_path / "chat.jsonl", [row])
    if reason is None:  # a text by another name
        assert rows_of(path, CHATTY, packing=False)[0].tolist() == [[1, WORDS + 1]]
        return
    with pytest.raises(RequestError, match=rf"chat\.jsonl' line 1 {reason}"):
        rows_of(path, CHATTY, packing=False)
