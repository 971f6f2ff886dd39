"""`compress chat` and `generate --chat`: turns through the chat template, what is kept of them, and what is refused."""

from __future__ import annotations

import io
import json
import shutil

import pytest

import runtime
from compress.cli import main
from compress.commands import chat
from runtime.errors import RequestError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def artifact(tiny_artifact, tmp_path_factory):
    """An artifact with a chat template."""
    path = shutil.copytree(tiny_artifact, tmp_path_factory.mktemp("chat") / "artifact")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


class Lines(io.StringIO):
    """A stdin; in a terminal if `input` is made to read it."""

    def isatty(self):
        return False


@pytest.fixture
def run(capsys, monkeypatch):
    """`run(lines, *arguments)` gives (exit code, stdout, stderr)."""

    def go(lines, *arguments):
        monkeypatch.setattr("sys.stdin", Lines("".join(f"{line}\n" for line in lines)))
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return go


def user(text):
    return {"role": "user", "content": text}


def test_generate_renders_the_prompt(run, artifact):
    model = runtime.load(artifact)
    code, out, _ = run([], "generate", artifact, "hi", "--chat", "-n", 6, "--json")
    assert code == 0
    assert json.loads(out)["text"] == model.generate("<user>hi\n<assistant>", max_new_tokens=6)
    assert model.generate([user("hi")], max_new_tokens=6) == json.loads(out)["text"]
    assert model.generate([[user("hi")], "other"], max_new_tokens=6)[0] == json.loads(out)["text"]
    assert model.chat_prompt([user("hi")]) == model.tokenizer("<user>hi\n<assistant>")["input_ids"]


def test_piped_lines_are_turns(run, artifact):
    model = runtime.load(artifact)
    code, out, err = run(["one", "", "two", "/reset", "two", "/quit", "three"], "chat", artifact, "-n", 5)
    assert code == 0, err
    first = model.generate([user("one")], max_new_tokens=5)
    history = [user("one"), {"role": "assistant", "content": first}, user("two")]
    second = model.generate(history, max_new_tokens=5)
    assert out == "".join(f"{reply}\n" for reply in (first, second, model.generate([user("two")], max_new_tokens=5)))
    assert "--max-new-tokens is 5" in err


def test_the_system_message_stays(run, artifact):
    model = runtime.load(artifact)
    _, out, _ = run(["one", "/reset", "one"], "chat", artifact, "-n", 4, "--system", "be short")
    reply = model.generate([{"role": "system", "content": "be short"}, user("one")], max_new_tokens=4)
    assert out == f"{reply}\n" * 2


def test_nothing_is_dropped_when_the_context_is_full(run, artifact):
    code, out, err = run(["a" * 60, "b" * 60], "chat", artifact, "-n", 8)
    assert code == 2
    assert len(out.splitlines()) >= 1
    assert "context holds 128" in err
    assert "/reset" in err
    code, _, err = run(["c" * 90], "chat", artifact)
    assert code == 0
    assert "the context is full" in err


def test_a_terminal_goes_on_after_ctrl_c_and_wrong_lines(artifact, monkeypatch, capsys):
    lines = iter(["/nothing", KeyboardInterrupt, "x" * 200, "one", "two", EOFError])

    def typed(prompt):
        line = next(lines)
        if isinstance(line, type):
            raise line
        return line

    real = runtime.Model.stream

    def stream(self, prompt, **options):
        for count, part in enumerate(real(self, prompt, **options)):
            if count == 2 and "one" in str(prompt[-1]):
                raise KeyboardInterrupt
            yield part

    monkeypatch.setattr("sys.stdin", type("Terminal", (Lines,), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(runtime.Model, "stream", stream)
    assert main(["chat", str(artifact), "-n", "9"]) == 0
    captured = capsys.readouterr()
    assert "unknown command /nothing" in captured.err
    assert "context holds 128" in captured.err
    assert "(stopped)" in captured.err
    model = runtime.load(artifact)
    partial = "".join(list(real(model, [user("one")], max_new_tokens=9))[:2])
    history = [user("one"), {"role": "assistant", "content": partial}, user("two")]
    assert partial + "\n" in captured.out
    assert captured.out.rstrip("\n").endswith(model.generate(history, max_new_tokens=9).rstrip("\n"))


def test_turns_reuse_the_cache(artifact):
    conversation = chat.Conversation(runtime.load(artifact), None, {"max_new_tokens": 3, "temperature": 0.0}, False)
    conversation.turn("a question of some length, which is read once")
    conversation.turn("and another")
    stats = conversation._model.stats
    assert stats["shared_prompt_tokens"] >= 64 or "decoder in C" not in stats["engine"]
    assert stats["prompt_tokens"] - stats["shared_prompt_tokens"] < 64


@pytest.mark.parametrize("arguments", [("chat",), ("generate", "hi", "--chat")])
def test_what_has_no_template(run, tiny_artifact, arguments):
    command, *rest = arguments
    code, out, err = run(["hi"], command, tiny_artifact, *rest)
    assert (code, out) == (2, "")
    assert "no chat template" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--system", " "), "--system"), (("--top-p", "7"), "top_p"), (("--kernels", "refrence"), "reference")],
)
def test_wrong_requests(run, artifact, options, message):
    code, out, err = run(["hi"], "chat", artifact, *options)
    assert (code, out) == (2, "")
    assert message in err


def test_wrong_messages(artifact):
    model = runtime.load(artifact)
    with pytest.raises(RequestError, match=r'message 0 .* needs a "role"'):
        model.generate([{"content": "hi"}])
    with pytest.raises(RequestError, match="no tools here"):
        model.generate([{"role": "tool", "content": "hi"}])
    with pytest.raises(RequestError, match="mixture"):
        model.generate([user("hi"), [1, 2]])
