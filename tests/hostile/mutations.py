"""Small changes that make a good file a hostile one: in its bytes, in its JSON, in its safetensors header, in its directory."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

OUTSIDE = "outside"  # a directory beside the one that is read, which nothing may be opened in
PATHS = (
    f"../{OUTSIDE}/secret.json", f"../{OUTSIDE}/secret.safetensors", "/etc/passwd", "..", ".", "", "/", "a/../../b", "..\\x", "C:\\x",
    "x\0y", "x" * 5000, "~/x", "//host/share", "file:///etc/passwd", "https://example.com/x", "hub/name", "-", "\ud800",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e308, float("nan"),
    float("inf"), float("-inf"),
)  # fmt: skip
WORDS = (
    "true", "float64", "F8_E4M3", "cuda:7", "auto", "none", "llama", "bert", "t5", "gpt2", "mamba", "LlamaForCausalLM", "int4",
    "__class__", "__import__('os').system('touch hacked')", "{{ ''.__class__.__mro__ }}", "%s%n", "\u202e", "é" * 300, "9" * 5000,
    "compressed-tensors", "compress", "gptq", "pack-quantized", "re:.*", "re:(a+)+$", "re:[", "*", "2:4", "W4A16",
)  # fmt: skip
_TOKENS = tuple(
    text.encode()
    for text in (
        "{", "}", "[", "]", '"', ":", ",", "null", "true", "1e999", "-1", "NaN", "\\u0000", "\\ud800", "'", "&a", "*a", "<<: ",
        "!!python/object/apply:os.system ['touch hacked']", "---", "\t", "#", "%", "|", ">",
    )
)  # fmt: skip


NO_JSON = (
    b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900, b"", b"\xff", b"null", b"[]", b'{"a": 1} x', b"9" * 9000, b"{}",
)  # fmt: skip


def value(chooser: random.Random, like: Any = None) -> Any:
    """Something that does not belong there."""
    kind = chooser.randrange(9)
    if kind < 3:
        return chooser.choice(NUMBERS)
    if kind == 3:
        return chooser.choice(PATHS)
    if kind == 4:
        return chooser.choice(WORDS)
    if kind == 5:
        return chooser.choice((None, True, False, [], {}, [[]], {"": None}, [None] * 3, ""))
    if kind == 6:
        deep: Any = 0
        for _ in range(chooser.choice((3, 50, 150))):
            deep = [deep] if chooser.random() < 0.5 else {"a": deep}
        return deep
    if kind == 7:
        return [like] * chooser.choice((0, 2, 1000)) if not isinstance(like, dict | list) else {"x": like}
    if isinstance(like, bool):
        return not like
    if isinstance(like, int):
        return like + chooser.choice((-1, 1, 8, -like * 2, 2**32))
    if isinstance(like, str):
        return like[: chooser.randrange(len(like) + 1)] + chooser.choice(("", "x", "\0", "/", "."))
    return str(like)


def in_json(content: Any, chooser: random.Random, most: int = 3) -> Any:
    """Some places changed: other values, keys gone, twice, or renamed."""
    content = copy.deepcopy(content)
    for _ in range(chooser.randint(1, most)):
        places = list(_places(content))
        if not places:
            return value(chooser, content)
        owner, key = chooser.choice(places)
        how = chooser.randrange(6)
        if how < 3:
            owner[key] = value(chooser, owner[key])
        elif how == 3:
            del owner[key]
        elif how == 4 and isinstance(owner, dict):
            owner[chooser.choice((str(key) + "x", str(key)[:-1], str(key).upper(), chooser.choice(PATHS)))] = owner.pop(
                key
            )
        else:
            other, name = chooser.choice(places)
            owner[key] = copy.deepcopy(other[name])
    return content


def _places(content: Any) -> Any:
    stack = [content]
    while stack:
        owner = stack.pop()
        keys = list(owner) if isinstance(owner, dict) else range(len(owner)) if isinstance(owner, list) else ()
        for key in keys:
            yield owner, key
            stack.append(owner[key])


def in_bytes(raw: bytes, chooser: random.Random) -> bytes:
    """Bits flipped, pieces cut out, repeated, or put in."""
    content = bytearray(raw)
    for _ in range(chooser.choice((1, 1, 2, 5, 20))):
        place = chooser.randrange(len(content) + 1)
        length = chooser.choice((1, 2, 8, 64, len(content)))
        how = chooser.randrange(5)
        if how == 0 and place < len(content):
            content[place] ^= 1 << chooser.randrange(8)
        elif how == 1:
            del content[place : place + length]
        elif how == 2:
            content[place:place] = content[place : place + length]
        elif how == 3:
            content[place:place] = chooser.choice(_TOKENS)
        else:
            content[place : place + length] = bytes(chooser.randrange(256) for _ in range(min(length, 64)))
    return bytes(content)


def dumped(content: Any) -> bytes:
    return json.dumps(content).encode()


def in_json_file(raw: bytes, chooser: random.Random) -> bytes:
    """Most often still JSON."""
    if chooser.random() < 0.02:
        return chooser.choice(NO_JSON)
    if chooser.random() < 0.8:
        try:
            return dumped(in_json(json.loads(raw), chooser))
        except (ValueError, RecursionError):
            pass
    return in_bytes(raw, chooser)


def in_safetensors(raw: bytes, chooser: random.Random) -> bytes:
    """The header's JSON, its length, or how long the file is."""
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    how = chooser.randrange(6)
    if how == 0:
        lie = chooser.choice(
            (0, 1, length - 1, length + 1, length * 2, len(raw), 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1)
        )
        return struct.pack("<Q", lie) + raw[8:]
    if how == 1:
        return raw[: chooser.randrange(len(raw))]
    if how == 2:
        return in_bytes(raw[: 8 + length], chooser) + data
    if how == 3:  # what is said of a tensor's place
        entry = header[chooser.choice([name for name in header if name != "__metadata__"])]
        field = chooser.choice(("dtype", "shape", "data_offsets"))
        entry[field] = (
            in_json(entry[field], chooser) if field != "dtype" else chooser.choice(("F64", "F31", "U8", "", 3, "F4"))
        )
        text = dumped(header)
    elif how == 4:
        names = [name for name in header if name != "__metadata__"]
        one, other = chooser.choice(names), chooser.choice(names)
        header[one], header[other] = header[other], header[one]
        text = dumped(header)
    else:
        text = dumped(in_json(header, chooser))
    return struct.pack("<Q", len(text)) + text + data


def in_directory(directory: Path, name: str, chooser: random.Random) -> None:
    """The file becomes what is no file, or leads somewhere else."""
    file = directory / name
    how = chooser.randrange(6)
    if how == 0:
        os.truncate(file, 0)
        return
    file.unlink()
    if how == 1:
        file.mkdir()
    elif how == 2:
        file.symlink_to("nowhere")
    elif how == 3:
        file.symlink_to(file.name)
    elif how == 4:
        os.mkfifo(file)
