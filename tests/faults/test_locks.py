"""One writer an output: whoever comes second is told who is there, and what a killed process leaves is no hindrance."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import contents, make_request

import compress
from export.folder import beside as written_beside
from runtime.errors import RequestError
from runtime.system import lock

HOLD = """
import sys, time
from pathlib import Path
from runtime.system.lock import locked
with locked(Path(sys.argv[1]), Path("out")):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(file: Path) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_held_lock_names_its_holder_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    holder = hold(file)
    words = f"out .*{holder.pid}.*{socket.gethostname()}"
    for clock in (None, 0, 2**31):  # what files say of times decides nothing
        if clock is not None:
            os.utime(file, (clock, clock))
        with pytest.raises(RequestError, match=words), lock.locked(file, Path("out")):
            pytest.fail("two held it")
        with pytest.raises(RequestError, match=words):
            lock.refuse_held(file, Path("out"))
    end(holder)
    assert file.exists()
    lock.refuse_held(file, Path("out"))
    with lock.locked(file, Path("out")):
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert not file.exists()


def test_a_lock_whose_holder_cannot_be_read(tmp_path: Path) -> None:
    with lock.locked(tmp_path / ".lock", tmp_path):
        for content in (b"", b"{}", b"[1]", b"\xff" * 9000):
            (tmp_path / ".lock").write_bytes(content)
            with pytest.raises(RequestError, match=str(tmp_path)):
                lock.refuse_held(tmp_path / ".lock", tmp_path)


def test_a_symbolic_link_is_no_lock(tmp_path: Path) -> None:
    """Else whoever may write to the directory could have any file of ours emptied."""
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(OSError, match=str(tmp_path / ".lock")), lock.locked(tmp_path / ".lock", tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "years of work"


def test_who_opened_a_lock_before_it_was_removed_does_not_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contender that opened the file, and gets the lock when the holder has removed the file, must not think that it holds it."""
    file, real = tmp_path / ".lock", fcntl.flock
    seen = []

    def flock(descriptor: int, operation: int) -> None:
        if not seen:  # the last holder leaves between the opening and the taking
            file.unlink()
        seen.append(descriptor)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock.locked(file, tmp_path):
        assert len(seen) == 2
        assert file.exists()


@pytest.mark.parametrize("which", ["inside", "beside"])
def test_a_second_run_into_one_output_is_refused_and_changes_nothing(tmp_path: Path, which: str) -> None:
    request, output = make_request(tmp_path, "compress"), tmp_path / "out"
    output.mkdir()
    holder = hold(getattr(lock, which)(output))
    before = contents(output)
    try:
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(RequestError, match=f"{output}.*{holder.pid}"):
                compress.apply(request, output=output, quiet=True, **options)
        assert contents(output) == before
        with pytest.raises(RequestError, match=str(holder.pid)), written_beside(output):
            pytest.fail("an export began")
    finally:
        end(holder)
    compress.apply(request, output=output, quiet=True)
    assert not list(tmp_path.glob(".*")) or which == "beside"
    assert not (output / ".lock").exists()


def test_a_draft_and_another_run_keep_out_of_each_others_way(tmp_path: Path) -> None:
    request, output = make_request(tmp_path, "draft"), tmp_path / "out"
    compress.apply({**request, "stages": request["stages"][:1]}, output=output, quiet=True)
    before = contents(output)
    with (
        lock.locked(lock.inside(output), output),
        pytest.raises(RequestError, match=str(os.getpid())),
    ):
        compress.draft(output, request, quiet=True)
    assert contents(output) == before


def test_a_run_that_another_has_finished_meanwhile_is_not_run_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking at the output and locking it there is the whole plan; another run may come and go."""
    from compress.run import run

    request, output, real = make_request(tmp_path, "compress"), tmp_path / "out", run.plan_session
    others: list[Any] = []

    def plan(*arguments: Any) -> Any:
        if not others:
            others.append(None)
            others.append(compress.apply(request, output=output, quiet=True))
        return real(*arguments)

    monkeypatch.setattr(run, "plan_session", plan)
    with pytest.raises(RequestError, match="--overwrite"):
        compress.apply(request, output=output, quiet=True)
    assert contents(output)["compress.json"]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [-(10**9), 10**9])
def test_clocks_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Set back or forward between two runs, in the midst of a run, and in what files say: the same bytes."""
    from compress.weights import block_pass

    request, output = make_request(tmp_path, "compress"), tmp_path / "out"
    straight = contents(compress.apply(request, output=tmp_path / "straight", quiet=True).path)
    real = block_pass.run_block

    def stop(job: Any, index: int, *rest: Any) -> Any:
        if index == 2:
            raise KeyboardInterrupt
        return real(job, index, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(block_pass, "run_block", stop)
        with pytest.raises(KeyboardInterrupt):
            compress.apply(request, output=output, quiet=True)
    now = time.time
    for file in output.rglob("*"):
        os.utime(file, (now() + seconds, now() + seconds))
    monkeypatch.setattr(time, "time", lambda: now() + seconds)
    assert contents(compress.apply(request, output=output, resume=True, quiet=True).path) == straight
