"""Command `compress chat`: a conversation with a model, through its chat template."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import typer

from compress.commands.options import PATH, with_generation_options
from runtime.errors import CompressError, RequestError

if TYPE_CHECKING:
    from runtime import Model

REPLY_TOKENS = 1024
_HELP = """/reset   start a new conversation
/quit    leave (also Ctrl-D)
/help    show this help
Ctrl-C stops a reply."""


@with_generation_options
def chat(
    model: str = PATH,
    system: str | None = typer.Option(None, "--system", metavar="TEXT", help="System message, before the first turn."),
    sampling: Any = None,
    loading: Any = None,
) -> None:
    """Chat with a model. Replies are streamed to stdout; everything else goes to stderr.

    --max-new-tokens limits a reply (default: 1,024).
    The KV cache is kept between turns, so that only new tokens are computed.
    If stdin is not a terminal, each line is a turn.

    \b
    Examples:
      compress chat out/my-w4
      compress chat out/my-w4 --system "Answer in one sentence." --temperature 0.7 --top-p 0.9
      compress chat out/my-w4 < questions.txt
    """
    import runtime

    if system is not None and not system.strip():
        raise RequestError("--system: the text is empty; leave the option out for no system message")
    loaded = runtime.load(model, **loading)
    if not isinstance(loaded, runtime.Model):
        what = type(loaded).__name__
        raise RequestError(f"{model} holds a {what}; a conversation needs a causal language model with a chat template")
    terminal = sys.stdin.isatty()
    conversation = Conversation(loaded, system, sampling, terminal)
    if terminal:
        _say("/help lists the commands, /quit leaves.")
    for line in _lines(terminal):
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            conversation.reset()
            _say("A new conversation begins.")
        elif line == "/help":
            _say(_HELP)
        elif line.startswith("/") and " " not in line and "/" not in line[1:]:
            _say(f"unknown command {line}; allowed: /reset, /quit, /help")  # and no turn: a reply to it would puzzle
        elif line:
            try:
                conversation.turn(line)
            except CompressError as error:
                _fail(terminal, error)


class Conversation:
    """The messages so far, and the model that continues them.

    Raises:
        RequestError: the model has no chat template, the template refuses a system message, or an option is out of range.
    """

    def __init__(self, model: Model, system: str | None, sampling: dict[str, Any], terminal: bool) -> None:
        self._model = model.session()
        self._sampling = sampling
        self._terminal = terminal
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()
        self._check()

    def _check(self) -> None:
        """Raise errors that every turn would raise before the first line is read."""
        prompt = self._model.chat_prompt([*self._system, {"role": "user", "content": "?"}])
        self._model.stream(prompt, **self._sampling | {"max_new_tokens": None})

    def reset(self) -> None:
        """Drop all messages except the system message."""
        self.messages: list[dict[str, str]] = list(self._system)

    def turn(self, text: str) -> None:
        """Send `text` and print the reply. In a terminal Ctrl-C stops it; the part that was printed stays in the conversation.

        Raises:
            RequestError: the conversation does not fit the model's context; it is left as it was.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        limit = self._room(asked)
        parts: list[str] = []
        stopped = False
        try:
            reply: Any = self._model.stream(asked, **self._sampling | {"max_new_tokens": limit})
            with closing(reply):
                for part in reply:
                    print(part, end="", flush=True)
                    parts.append(part)
        except KeyboardInterrupt:
            if not self._terminal:
                raise
            stopped = True
        if stopped and not parts:
            _say("(stopped before the first word; your message was discarded)")
            return
        print(flush=True)
        self.messages = [*asked, {"role": "assistant", "content": "".join(parts)}]
        if stopped:
            _say("(stopped)")
        elif self._model.stats["finish_reasons"] == ["length"]:
            full = limit < (self._sampling["max_new_tokens"] or REPLY_TOKENS)
            _say(f"(the reply ends here: {'the context is full' if full else f'--max-new-tokens is {limit}'})")

    def _room(self, messages: list[dict[str, str]]) -> int:
        """Largest number of tokens of the reply."""
        wanted = self._sampling["max_new_tokens"] or REPLY_TOKENS
        context = self._model.engine.context_length
        if context is None:
            return wanted
        try:
            left = context - len(self._model.chat_prompt(messages))
        except RequestError as error:
            if len(messages) > len(self._system) + 1:
                raise RequestError(f"{error}; /reset starts a new conversation") from None
            raise
        if left < 1:
            raise RequestError(
                f"the conversation fills the model's context of {context} tokens; /reset starts a new one"
            )
        return min(wanted, left)


def _lines(terminal: bool) -> Iterator[str]:
    """Lines of the user, stripped, until the end of stdin; in a terminal Ctrl-C discards a line."""
    if not terminal:
        try:
            yield from (line.strip() for line in sys.stdin)
        except UnicodeDecodeError as error:
            raise RequestError(f"stdin is not UTF-8 text (byte {error.start} of what was read)") from None
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history)
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(terminal: bool, error: CompressError) -> None:
    """Report an error of one line; in a terminal the conversation goes on, a script ends."""
    if not terminal:
        raise error
    _say(f"compress: {error}")
