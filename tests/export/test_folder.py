"""The directory of an export: what may be written to, what is left after a failure, whose errors are whose."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from export import folder
from export.folder import beside, check_output
from runtime.errors import CompressError, RequestError


def dead_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def names(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir())


def write(output: Path, act: Callable[[Path], object]) -> None:
    """Write an export as `act` does it, given the temporary directory."""
    with beside(output) as temporary:
        act(temporary)


def fail(error: Exception) -> Callable[[Path], object]:
    def act(temporary: Path) -> None:
        (temporary / "half").write_text("written")
        raise error

    return act


# ---------------------------------------------------------------- what may be written to
@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("file/out", "file is a file"),
        ("file/deeper/out", "file is a file"),
        ("x" * 300, "File name too long"),
        ("x" * 300 + "/out", "File name too long"),
        ("new/" + "x" * 300, "File name too long"),
        ("new/" + "x" * 300 + "/out", "File name too long"),
        ("new/" + "x" * 250, "File name too long"),
        ("x" * 250, "File name too long"),  # fits itself, but not with what is added while it is written
        ("y/" * 3000 + "out", "File name too long"),
        ("loop", "leads to itself"),
    ],
    ids=lambda text: text[:12],
)
def test_outputs_that_cannot_be_are_refused_in_a_sentence(tmp_path: Path, output: str, words: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    before = names(tmp_path)
    with pytest.raises(RequestError, match=words) as caught:
        check_output(tmp_path / output, tmp_path / "artifact", overwrite=False)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert names(tmp_path) == before


def test_a_mounted_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(RequestError, match="mounted"):
        check_output(tmp_path / "out", tmp_path / "artifact", overwrite=False)


def test_where_a_link_leads_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "out").symlink_to("disk/real")
    check_output(tmp_path / "out", tmp_path / "artifact", overwrite=False)
    with beside(tmp_path / "out") as temporary:
        (temporary / "a").write_text("1")
    assert (tmp_path / "out").is_symlink()
    assert names(tmp_path) == ["disk", "out"]
    assert names(tmp_path / "disk") == ["real"]
    assert names(tmp_path / "out") == ["a"]


# ---------------------------------------------------------------- what is left
def test_directories_made_for_it_go_with_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "there" / "new" / "newer" / "out", fail(ZeroDivisionError()))
    assert names(tmp_path) == ["there"]
    assert names(tmp_path / "there") == []


def test_directories_that_another_uses_by_now_stay(tmp_path: Path) -> None:
    def act(temporary: Path) -> None:
        (tmp_path / "new" / "of another").write_text("")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "new" / "newer" / "out", act)
    assert names(tmp_path / "new") == ["of another"]


def test_leftovers_of_dead_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    dead, alive = dead_process(), os.getppid()
    ours = [f".out.{dead}.tmp", f".out.{dead}.tmp.onnx_k3", f".out.{os.getpid()}.tmp", f".out.{dead}.old"]
    others = [f".out.{alive}.tmp", f".out2.{dead}.tmp", f".out.{dead}.tmp.txt.d", ".out.tmp", f"out.{dead}.tmp"]
    for name in ours + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").write_text("half")
    with beside(tmp_path / "out") as temporary:
        assert names(temporary) == []
        assert f".out.{dead}.tmp" not in names(tmp_path)
        assert f".out.{dead}.old" in names(tmp_path), "it may be the only whole export until this one is there"
    assert names(tmp_path) == sorted([*others, "out"])


def test_an_earlier_one_of_our_own_number_is_no_hindrance(tmp_path: Path) -> None:
    """In a container every process may have number 1."""
    old = tmp_path / f".out.{os.getpid()}.old"
    old.mkdir()
    (old / "model").write_text("older")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model").write_text("earlier")
    with beside(tmp_path / "out") as temporary:
        (temporary / "model").write_text("new")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "model").read_text() == "new"


# ---------------------------------------------------------------- whose errors
def test_an_error_of_another_file_passes_as_it_is(tmp_path: Path) -> None:
    artifact = tmp_path / "artifact.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        write(tmp_path / "out", lambda temporary: artifact.read_bytes())
    assert caught.value.filename == str(artifact)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "out", fail(OSError(errno.EIO, "Input/output error")))  # nobody can say of what
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EROFS])
def test_what_only_writing_meets_is_the_outputs(tmp_path: Path, number: int) -> None:
    with pytest.raises(CompressError, match=r"\bout\b"):
        write(tmp_path / "out", fail(OSError(number, os.strerror(number))))


def test_an_error_in_the_folder_is_the_outputs(tmp_path: Path) -> None:
    with pytest.raises(CompressError, match=r"out\b.*\(b\)"):
        write(tmp_path / "out", lambda temporary: (temporary / "a" / "b").write_text(""))
    assert names(tmp_path) == []


def test_an_error_of_flushing_is_the_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folder.os, "fsync", fsync)
    with pytest.raises(CompressError, match=r"out\b.*Input/output error"):
        write(tmp_path / "out", lambda temporary: None)
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_elsewhere_is_named(tmp_path: Path, number: int) -> None:
    output, text = tmp_path / "new" / "out", os.strerror(number)
    with pytest.raises(CompressError) as caught:
        write(output, fail(OSError(number, text, "/scratch/probe.npz")))
    assert str(caught.value).startswith(f"the disk is full (/scratch/probe.npz) while {output} was written")
    with pytest.raises(CompressError) as caught:
        write(output, lambda temporary: fail(OSError(number, text, str(temporary / "model")))(temporary))
    assert str(caught.value).startswith(f"the disk is full while {output} was written")
    assert names(tmp_path) == []


def test_an_output_inside_the_artifact_is_refused(tmp_path: Path) -> None:
    (tmp_path / "artifact").mkdir()
    with pytest.raises(RequestError, match="inside"):
        check_output(tmp_path / "artifact" / "inner" / "out", tmp_path / "artifact", overwrite=False)


def test_what_is_written_can_be_read_by_others(tmp_path: Path) -> None:
    """safetensors writes for the owner only; an export is carried to other machines and users."""
    before = os.umask(0o022)
    try:
        with beside(tmp_path / "out") as folder:
            (folder / "a").write_text("x")
            (folder / "a").chmod(0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "a").stat().st_mode & 0o777 == 0o644
