"""Ctrl-C, SIGTERM and processes that the kernel kills: one sentence each, nothing is left running, and --resume goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from runs import contents, make_request
from warm_python import python

import compress
from compress.evaluate import speed
from compress.evaluate.speed import SpeedRequest, run_isolated
from export.triton_aot import build
from runtime.errors import CompressError
from runtime.system import native
from runtime.system.processes import how_it_ended

ROOT = Path(__file__).resolve().parents[2]
# Waits in the second block, so that the signal finds it there.
APPLY = """
import sys, time
from compress.weights import block_pass as blocks
real = blocks.run_block
def one_block(job, index, *rest):
    if index == 1:
        print("here", flush=True)
        time.sleep(60)
    return real(job, index, *rest)
blocks.run_block = one_block
from compress.cli import main
sys.exit(main(sys.argv[1:]))
"""
DIE = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def start(*arguments: str, interpreter: str = sys.executable) -> subprocess.Popen[str]:
    """A process that Ctrl-C stops, also where this one ignores it (under nohup, in a background job), which children inherit."""
    return subprocess.Popen(
        [interpreter, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "words"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_a_run_that_is_told_to_stop(tmp_path: Path, number: int, code: int, words: str) -> None:
    request, file = make_request(tmp_path, "compress"), tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(request), encoding="utf-8")
    interpreter = sys.executable if number == signal.SIGINT else python()
    command = ["-c", APPLY, "apply", str(file), "--output", str(tmp_path / "out"), "--quiet"]
    process = start(*command, interpreter=interpreter)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.splitlines()[-1] == (
        f"compress: {words}; finished work is kept: run the same command with --resume to continue"
    )
    assert "Traceback" not in said
    assert not (tmp_path / "out" / ".lock").exists()
    straight = compress.apply(request, output=tmp_path / "straight", quiet=True)
    resumed = compress.apply(request, output=tmp_path / "out", resume=True, quiet=True)
    assert contents(resumed.path) == contents(straight.path)


BENCH = """
import sys
from compress.evaluate import speed
real = speed.subprocess.run
def run(command, **options):
    return real([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"], **{**options, "stdout": None})
speed.subprocess.run = run
from compress.cli import main
sys.exit(main(["bench", "nowhere"]))
"""


@pytest.mark.slow
def test_what_a_command_has_started_ends_with_it() -> None:
    process = start("-c", BENCH)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert said == "compress: stopped by SIGTERM\n"
    for _ in range(50):
        if not child.is_running() or child.status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the process that was started is still there")


# ---------------------------------------------------------------- killed by the kernel
KILLED = "was killed (SIGKILL), most likely by the kernel because the machine ran out of memory: close other programs"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, KILLED), (-11, "was ended by SIGSEGV"), (-200, "was ended by signal 200"), (3, "ended with exit code 3"),
        (None, "ended without a word"),
    ],
)  # fmt: skip
def test_how_a_process_ended_in_words(code: int | None, words: str) -> None:
    assert how_it_ended(code).startswith(words)


def test_a_measuring_process_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", DIE], **options)

    monkeypatch.setattr(speed.subprocess, "run", run)
    with pytest.raises(CompressError) as caught:
        run_isolated(SpeedRequest("out/model"))
    assert str(caught.value).startswith(f"the process that measures out/model {KILLED}")
    assert caught.value.exit_code == 1


class Variant:
    """Stands for a kernel; sent to the worker, so of a module."""

    kernel, arguments, options = "matvec", (), ()


@pytest.mark.parametrize("when", ["import sys; sys.stdin.read(); ", ""])
def test_a_compiling_process_that_is_killed(when: str) -> None:
    """While it compiles, or before it is asked."""

    worker = subprocess.Popen([sys.executable, "-c", when + DIE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        if not when:
            worker.wait()
        with pytest.raises(CompressError) as caught:
            list(build._ask(worker, [build.Task(Variant(), 90)]))  # type: ignore[arg-type]
    finally:
        build._stop([worker])
    assert "matvec" in str(caught.value)
    assert KILLED in str(caught.value)


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (-9, b"", KILLED),
        (1, b"gcc: fatal error: Killed signal terminated program cc1\ncompilation terminated.\n", KILLED),
        (1, b"x.c:1: error: expected ';'\n", "expected ';'"),
    ],
)
def test_a_compiler_that_is_killed(code: int, said: bytes, words: str) -> None:
    assert words in native._reason(subprocess.CalledProcessError(code, ["cc"], stderr=said))
