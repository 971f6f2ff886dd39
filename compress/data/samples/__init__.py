"""Short samples of prose, code and conversation, on which every draft's acceptance is reported whatever it was trained on.

The texts were written for this project: prose of many registers, code in several languages, a conversation on many subjects.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import torch

KINDS = ("text", "code", "chat")
LENGTH = 64  # tokens of a row, half of which are continued
MOST = 32  # rows of a kind
_LEAST = 2
_TURN = re.compile(r"^(User|Assistant): ", re.MULTILINE)


def sample_rows(tokenizer: Any, longest: int = LENGTH, most: int = MOST) -> dict[str, torch.Tensor]:
    """{kind: int64 `[n, s]`}, n at most `most`, s at most 64; kinds that a tokenizer makes less than two rows of are left out.

    Rows do not overlap and are spread evenly over the whole of a sample, in its order. Each begins with the tokenizer's BOS where the
    tokenizer puts one before a text by itself. The conversation is written as the tokenizer's chat template has it, where there is one.

    Args:
        tokenizer: of the target.
        longest: tokens of a row at most, 2 or more.
        most: rows of a kind at most.
    """
    length = min(LENGTH, longest)
    start = _start(tokenizer)
    size = length - len(start)
    found = {}
    for kind in KINDS:
        text = _templated(tokenizer) if kind == "chat" else None
        ids = tokenizer(read(kind) if text is None else text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids[: len(start)] == start:  # of the template
            ids = ids[len(start) :]
        count = len(ids) // size
        if count >= _LEAST:
            rows = min(count, most)
            places = [row * count // rows * size for row in range(rows)]
            found[kind] = torch.tensor([start + ids[at : at + size] for at in places], dtype=torch.int64)
    return found


def read(kind: str) -> str:
    """The whole sample of a kind."""
    return resources.files(__package__).joinpath(f"{kind}.txt").read_text(encoding="utf-8")


def turns() -> list[dict[str, str]]:
    """The conversation, as chat templates take it: "role" is user and assistant in turn, "content" may have several lines."""
    parts = _TURN.split(read("chat"))[1:]
    return [
        {"role": role.lower(), "content": content.strip()}
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _start(tokenizer: Any) -> list[int]:
    """[BOS] where the tokenizer puts it before a text, else []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _templated(tokenizer: Any) -> str | None:
    """The conversation through the tokenizer's chat template; None where it has none, or one that is not for plain turns of text.

    All of it is one dialogue, so that what a template puts before a dialogue is in one row and not in many.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    from jinja2 import TemplateError

    dialogue = turns()
    try:
        text = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=False)
    except (TemplateError, TypeError, ValueError):  # it wants other roles, contents in parts, a template's name
        return None
    return text if all(turn["content"] in text for turn in dialogue) else None
