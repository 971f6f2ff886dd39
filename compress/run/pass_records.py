"""What the passes of a run have done, as it is recorded in its directory."""

from __future__ import annotations

from typing import Any

from compress.core.run_directory import RunDirectory
from compress.run.session import Session


def part_name(number: int) -> str:
    """Of a pass: of its record, and of its checkpoint."""
    return f"pass-{number:05d}"


def facts(directory: RunDirectory, session: Session) -> list[dict[str, Any]]:
    """What is done, in order, for the manifest."""
    found = (directory.record(part_name(number)) for number in range(len(session.jobs)))
    return [record for record in found if record is not None]
