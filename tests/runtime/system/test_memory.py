"""What a process may still take, with the limits of control groups laid out as kernels do."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from runtime.system import memory

MB = 2**20


def group(place: Path, version: int, limit: str, used: int, inactive: int = 0, active: int = 0) -> None:
    """Files of one group, of version 1 or 2."""
    place.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    (place / names[0]).write_text(f"{limit}\n")
    (place / names[1]).write_text(f"{used}\n")
    # Version 1 has the plain names too, without what is below the group.
    rows = {"anon": 7, "inactive_file": 5, "active_file": 3} | {
        f"{prefix}inactive_file": inactive,
        f"{prefix}active_file": active,
    }
    (place / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in rows.items()))


@pytest.fixture
def left(tmp_path: Path):
    """`left(line)`: what the groups named in that line of a process's membership leave."""

    def left(*lines: str) -> list[int]:
        (tmp_path / "membership").write_text("".join(f"{line}\n" for line in lines))
        return list(memory.left_in_groups(tmp_path / "membership", tmp_path / "groups"))

    (tmp_path / "groups").mkdir()
    return left


def test_a_group_and_those_around_it(tmp_path: Path, left) -> None:
    group(tmp_path / "groups/jobs", 2, str(300 * MB), 250 * MB, inactive=20 * MB, active=10 * MB)
    group(tmp_path / "groups/jobs/one", 2, str(100 * MB), 90 * MB, inactive=5 * MB)
    assert left("0::/jobs/one") == [15 * MB, 80 * MB]
    group(tmp_path / "groups/jobs/one", 2, "max", 90 * MB)
    assert left("0::/jobs/one") == [80 * MB]
    assert left("0::/") == []  # the top has no such files


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path, left) -> None:
    group(tmp_path / "groups/memory", 1, str(64 * MB), 60 * MB, inactive=6 * MB, active=2 * MB)
    assert left("9:name=systemd:/docker/ab", "4:memory:/docker/ab", "0::/docker/ab") == [12 * MB]
    group(tmp_path / "groups", 2, str(32 * MB), 30 * MB)
    assert left("0::/") == [2 * MB]
    group(
        tmp_path, 2, str(MB), 0
    )  # no group, and outside: as a process that was moved out of its container's group sees itself
    assert left("0::/../..") == [2 * MB]


def test_the_least_of_them_counts(tmp_path: Path, left, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = memory.free_bytes()
    assert 0 < whole <= psutil.virtual_memory().total
    monkeypatch.setattr(memory, "left_in_groups", lambda *_: iter([10 * MB, 5 * MB]))
    assert memory.free_bytes() == 5 * MB
    monkeypatch.setattr(memory, "left_in_groups", lambda *_: iter([-3]))  # over its limit, as may be for an instant
    assert memory.free_bytes() == 0


def test_where_there_are_no_groups(tmp_path: Path) -> None:
    assert list(memory.left_in_groups(tmp_path / "none", tmp_path)) == []
