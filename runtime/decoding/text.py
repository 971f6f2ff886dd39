"""Tokens to text while they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.decoding.stops import StopMatcher

__all__ = ["REPLACEMENT", "Detokenizer", "StopMatcher"]

REPLACEMENT = "\ufffd"
# An unfinished UTF-8 character is at most three bytes, each of which a tokenizer may show as one replacement character.
LONGEST_UNFINISHED = 3
PATIENCE = 8  # tokens; what is still unreadable then is no text, and all but its end is given out
CONTEXT_TOKENS = 8


class Detokenizer:
    """Turns a growing list of token ids into pieces of text that are final.

    Decoding a token alone is wrong for tokenizers where spaces or bytes depend on the neighbours, and decoding everything
    each time is quadratic. So a short window is decoded: some tokens whose text is already out, and the new ones. Trailing
    replacement characters wait, since the next token may complete the character.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: ids before the first new token; they are context and give no text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = list(prompt[-CONTEXT_TOKENS:])
        self._start = 0  # where the window begins
        self._read = len(self._ids)  # the window's text is out up to here
        self._emitted = len(self._decode(0))  # characters of the window that are out

    def push(self, token: int) -> str:
        """The text that is certain after one more token; it may be empty."""
        self._ids.append(token)
        text = self._decode(self._start)
        waiting = len(text) - len(text.rstrip(REPLACEMENT))
        if waiting and len(self._ids) - self._read <= PATIENCE:
            # Llama 2's byte fallback decodes a run of byte tokens as a whole: the first byte of a character makes the
            # finished characters before it unreadable too, until it is complete.
            final = text[: text.index(REPLACEMENT)]
        else:
            final = text[: len(text) - min(waiting, LONGEST_UNFINISHED)]
        piece = final[self._emitted :]
        self._emitted = max(self._emitted, len(final))
        if waiting == 0 and piece:
            # Slide: the tokens since the last slide become the context of the next ones.
            self._start, self._read = self._read, len(self._ids)
            self._emitted = len(self._decode(self._start))
        return piece

    def finish(self) -> str:
        """What still waits: an unfinished character is shown as it stands."""
        text = self._decode(self._start)
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
