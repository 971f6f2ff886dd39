"""Prompts as users give them, read into token ids."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from runtime.errors import RequestError, first_line
from runtime.system.describe import is_integer, show


@dataclass(frozen=True)
class Prompts:
    """Token ids of each prompt (of a sound its features), whether outputs are text, and whether they came as a batch."""

    ids: list[Any]
    are_text: bool
    are_batch: bool

    def name(self, index: int) -> str:
        """What messages call one of them."""
        return f"prompt {index}" if self.are_batch else "the prompt"


class PromptReader:
    """Reads texts, token ids, conversations (lists of messages), and lists (tensors, arrays) of either.

    Args:
        tokenizer: a transformers tokenizer; None: texts are refused.
        path: the model's directory, for messages.
        vocab_size: ids are below it. context_length: most ids of a prompt; None: any number.
    """

    def __init__(self, tokenizer: Any, path: Path, vocab_size: int, context_length: int | None) -> None:
        self._tokenizer = tokenizer
        self._path = path
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._lock = threading.Lock()  # tokenizers change settings inside while they encode

    def read(self, prompt: Any, what: str = "prompt") -> Prompts:
        """Token ids of `prompt`, which messages call `what`.

        Raises:
            RequestError: not a prompt, empty, no Unicode, ids outside the vocabulary, too long. In a batch it says which.
        """
        is_batch = False
        parts = [prompt]
        if not isinstance(prompt, str):
            prompt = _plain(prompt)
            if not isinstance(prompt, (list, tuple)):
                raise RequestError(
                    f"{what} must be a text, a list of token ids, or a list of those, not a {type(prompt).__name__}"
                )
            if not prompt:
                raise RequestError(f"the {what} is empty")
            prompt = [_plain(part) for part in prompt]
            is_batch = not _are_ids(prompt) and not _is_conversation(prompt)
            parts = prompt if is_batch else [prompt]
        names = [f"{what} {i}" for i in range(len(parts))] if is_batch else [f"the {what}"]
        are_text = all(isinstance(part, str) or _is_conversation(part) for part in parts)
        if not are_text and not all(isinstance(part, (list, tuple)) and _are_ids(part) for part in parts):
            raise RequestError(f"{what} must be all texts or all token ids, not a mixture")
        read = self._read_text if are_text else self.check
        return Prompts([read(part, name) for part, name in zip(parts, names, strict=True)], are_text, is_batch)

    def _read_text(self, text: Any, name: str) -> list[int]:
        return self.encode(text, name) if isinstance(text, str) else self.encode_chat(text, name)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], name: str = "the conversation") -> list[int]:
        """Token ids of a conversation through the tokenizer's chat template, with its generation prompt.

        Raises:
            RequestError: no chat template, or it rejects these messages.
        """
        if self._tokenizer is None or not getattr(self._tokenizer, "chat_template", None):
            lacks = "tokenizer" if self._tokenizer is None else "chat template"
            raise RequestError(f"{self._path} has no {lacks}, which a conversation needs: give plain text instead")
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise RequestError(
                    f'message {number} of {name} needs a "role" and a "content", not {show(dict(message))}'
                )
        try:
            with self._lock:
                text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs: jinja2 raises whatever comes up in one
            raise RequestError(f"the chat template of {self._path} refuses {name}: {first_line(error)}") from error
        # The template writes the special tokens itself.
        return self.encode(text, name, add_special_tokens=False)

    def check(self, ids: Sequence[int], name: str = "the prompt") -> list[int]:
        """`ids` as Python integers, if they can be run."""
        if not ids:
            raise RequestError(f"{name} is empty")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise RequestError(f"token id {show(wrong)} is outside the vocabulary: ids are 0 to {self._vocab_size - 1}")
        limit = self._context_length
        if limit is not None and len(ids) > limit:
            raise RequestError(f"{name} has {len(ids)} tokens, the model's context holds {limit}")
        return [int(i) for i in ids]

    def encode(self, text: str, name: str, prefix: str = "", **options: Any) -> list[int]:
        """Token ids of a text after `prefix`; `options` are the tokenizer's."""
        if self._tokenizer is None:
            raise RequestError(f"{self._path} has no tokenizer: give token ids instead of a text")
        if not text:
            raise RequestError(f"{name} is empty")
        try:
            text.encode()
            with self._lock:
                ids = list(self._tokenizer(prefix + text, **options)["input_ids"])
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"{name} is not valid Unicode text: {error}") from error
        return self.check(ids, name)

    def read_rows(self, input_ids: Any, name: str = "input_ids") -> torch.Tensor:
        """Token ids `[batch, seq]`, which messages call `name`, as an int64 tensor.

        Raises:
            RequestError: another shape, ids outside the vocabulary, rows that are too long.
        """
        ids = _integers(input_ids, name)
        for number, row in enumerate(ids.tolist()):
            self.check(row, f"row {number} of {name}")
        return ids


def _integers(values: Any, name: str) -> torch.Tensor:
    try:
        ids = torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise RequestError(f"{name} must be token ids of shape [batch, seq], all rows equally long") from error
    if ids.dim() != 2 or not ids.numel() or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise RequestError(
            f"{name} must be integers of shape [batch, seq], not {str(ids.dtype).removeprefix('torch.')} "
            f"of shape {list(ids.shape)}"
        )
    return ids.long()


def read_mask(attention_mask: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """A mask as int64 `[batch, seq]` on the CPU, 1 = token; None where nothing is masked.

    Raises:
        RequestError: another shape than `ids`, other values than 0 and 1, or a row without a token.
    """
    if attention_mask is None:
        return None
    try:
        mask = torch.as_tensor(attention_mask).cpu()
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestError("attention_mask must be 0 and 1 of shape [batch, seq]") from error
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise RequestError(f"attention_mask must be 0 and 1 of shape {list(ids.shape)}, as input_ids")
    if not bool((mask == 1).any(dim=1).all()):
        raise RequestError("attention_mask must leave every row a token")
    return None if bool((mask == 1).all()) else mask.long()


def pad_right(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of any lengths as ids and mask (1 = token; None when all are equally long), int64 `[rows, longest]`."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    lengths = torch.tensor([[len(row)] for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths).long()
    return ids, None if bool(mask.all()) else mask


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def _is_conversation(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(part, Mapping) for part in value)


def _are_ids(values: Sequence[Any]) -> bool:
    return all(type(value) is int or is_integer(value) for value in values)
