"""A directory that takes the place of another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.system.directories import replace_directory


def made(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_the_new_one_is_there_and_nothing_else(tmp_path: Path, there: bool, left: bool) -> None:
    new, place, aside = made(tmp_path / "new", "new"), tmp_path / "place", tmp_path / "aside"
    if there:
        made(place, "old")
    if left:
        made(aside, "older")
    replace_directory(new, place, aside)
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
    assert (place / "file").read_text() == "new"


def test_the_old_one_comes_back_where_the_new_one_cannot_be_renamed(tmp_path: Path) -> None:
    place = made(tmp_path / "place", "old")
    with pytest.raises(OSError):
        replace_directory(tmp_path / "nowhere", place, tmp_path / "aside")
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
    assert (place / "file").read_text() == "old"
    aside = made(tmp_path / "aside", "older")
    place.rename(tmp_path / "gone")
    with pytest.raises(OSError):
        replace_directory(tmp_path / "nowhere", place, aside)
    assert (aside / "file").read_text() == "older"  # it may be the only whole one
