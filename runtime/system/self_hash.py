"""Self-hashed text files: each holds its own SHA-256, so that a single flipped bit is found.

The digest is of the file's own bytes with zeros in the place of its digits: spaces and the way in which numbers are written count too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

KEY = "manifest_sha256"
_ZEROS = "0" * 64
_JSON = (f'"{KEY}": "', '"')
_PAGE = ("<!-- SHA-256 of this page with zeros here: ", " -->")


def sealed_json(content: dict[str, Any], sort_keys: bool = True, default: Callable[[Any], Any] | None = None) -> str:
    """The text of a JSON file, two spaces a level, with its digest under `KEY`; the other arguments are those of `json.dumps`."""
    ordered = {**{key: value for key, value in content.items() if key != KEY}, KEY: _ZEROS}
    text = json.dumps(ordered, indent=2, sort_keys=sort_keys, ensure_ascii=False, default=default) + "\n"
    return _sealed(text, _JSON)


def sealed_page(html: str) -> str:
    """A page with its digest in a comment at the end."""
    return _sealed(f"{html.rstrip()}\n{_PAGE[0]}{_ZEROS}{_PAGE[1]}\n", _PAGE)


def json_is_whole(raw: bytes) -> bool:
    """Whether the bytes are those that `sealed_json` gave."""
    return _is_whole(raw, _JSON)


def page_is_whole(raw: bytes) -> bool:
    """Whether the bytes are those that `sealed_page` gave."""
    return _is_whole(raw, _PAGE)


def _sealed(text: str, around: tuple[str, str]) -> str:
    place = _ZEROS.join(around)
    digest = hashlib.sha256(text.encode()).hexdigest()
    before, found, after = text.rpartition(place)
    assert found
    return before + digest.join(around) + after


def _is_whole(raw: bytes, around: tuple[str, str]) -> bool:
    pattern = re.compile(re.escape(around[0]).encode() + b"([0-9a-f]{64})" + re.escape(around[1]).encode())
    found = list(pattern.finditer(raw))
    if not found:
        return False
    begin, end = found[-1].span(1)
    return hashlib.sha256(raw[:begin] + _ZEROS.encode() + raw[end:]).hexdigest().encode() == found[-1][1]
