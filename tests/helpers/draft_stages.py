"""Draft stages small enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runs import TIMED

from compress.core.tracking import Tracking

RTN = {"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}
SHORT = {
    "layers": 1,
    "samples": 16,
    "sequence_length": 32,
    "steps": 2,
    "batch_size": 4,
    "evaluate_every": 2,
    "tokens": 3,
    "data": "given",
}
# Fields that a method does not have.
WITHOUT = {"medusa": ["layers"], "mtp": ["layers"], "kangaroo": ["layers"], "skip": [*SHORT]}

#: Of a reporter that nobody follows.
UNTRACKED = Tracking(None, "", {}, print)


def draft(method: str = "distillspec", **changes: Any) -> dict[str, Any]:
    """A stage; fields that are None are left out."""
    own = {key: value for key, value in SHORT.items() if key not in WITHOUT.get(method, ())}
    fields = {key: value for key, value in {**own, **changes}.items() if value is not None}
    return {"draft": {"method": method, **fields}}


def files(path: Path) -> dict[str, bytes]:
    """All that a run writes, but for what has times in it."""
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name not in TIMED}
