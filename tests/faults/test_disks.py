"""Disks that are full, read only, broken or gone while a run writes: one sentence, exit code 1, and --resume ends with the same bytes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import yaml
from runs import contents, make_request

import compress
from compress.cli import main

FIRST = 6  # those before make the directory this run's: there the request is wrong, or nothing is there yet
OPERATIONS = 58  # at least so many are there before the artifact is complete
MORE = int(os.environ.get("FAULTS_MORE") or 1)
Answer = tuple[int, dict[str, Any], str]
Wrong = Callable[[Path, bool], BaseException]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A recipe file, and the bytes of what it makes."""
    room = tmp_path_factory.mktemp("job")
    request = make_request(room, "compress")
    (room / "recipe.yaml").write_text(yaml.safe_dump(request), encoding="utf-8")
    return room / "recipe.yaml", contents(compress.apply(request, output=room / "straight", quiet=True).path)


@pytest.fixture
def ask(job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`ask(*options)`: exit code, JSON and stderr of `compress apply`."""

    def run(*options: str) -> Answer:
        capsys.readouterr()
        code = main(
            ["apply", str(job[0]), "--output", str(tmp_path / "out"), "--quiet", "--json", "--prompt", "", *options]
        )
        said = capsys.readouterr()
        return code, json.loads(said.out), said.err

    return run


@contextmanager
def failing(number: int, wrong: Wrong, place: Path) -> Iterator[list[int]]:
    """The disk below `place` fails from the `number`-th operation on, which is cut off in its midst. Yields the count of operations."""
    seen = [0]
    undo = []

    def patch(owner: Any, name: str, position: int = 0) -> None:
        real = getattr(owner, name)

        def operation(*arguments: Any, **options: Any) -> Any:
            file = Path(str(arguments[position]))
            if place not in (file, *file.parents) or file.name in ("compress.log", ".report.html.tmp"):
                return real(*arguments, **options)
            seen[0] += 1
            if seen[0] >= number:
                if seen[0] == number and name in ("serialize_file", "write_text"):
                    file.write_bytes(b"half")
                raise wrong(file, name == "serialize_file")
            return real(*arguments, **options)

        setattr(owner, name, operation)
        undo.append(lambda: setattr(owner, name, real))

    patch(safetensors.torch, "serialize_file", 1)
    for name in ("write_text", "mkdir", "rename"):
        patch(Path, name)
    patch(os, "replace")
    try:
        yield seen
    finally:
        for step in undo:
            step()


def as_python(number: int) -> Wrong:
    return lambda file, tensors: OSError(number, os.strerror(number), str(file))


def as_safetensors(number: int) -> Wrong:
    """The library, where it writes, keeps nothing of the system's error but the text."""
    text = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
    return lambda file, tensors: safetensors.SafetensorError(text) if tensors else as_python(number)(file, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("how", [as_python, as_safetensors])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EROFS, "Read-only file system"),
        (errno.EIO, "Input/output error"),
        (errno.EACCES, "Permission denied"),
    ],
)
def test_a_disk_that_fails_at_any_operation(
    job: Any, ask: Callable[..., Answer], tmp_path: Path, how: Callable[[int], Any], number: int, words: str
) -> None:
    seed = int(os.environ.get("FAULTS_SEED") or time.time_ns())
    print(f"FAULTS_SEED={seed} repeats these operations")
    chooser, output = random.Random(seed), tmp_path / "out"
    for _ in range(MORE):
        shutil.rmtree(output, ignore_errors=True)
        with failing(chooser.randrange(FIRST, OPERATIONS), how(number), output):
            code, found, said = ask()
        assert (code, found["exit_code"]) == (1, 1), found
        assert words in found["error"]
        assert "unexpected" not in found["error"]
        assert "Traceback" not in said
        assert not (output / "compress.json").exists()
        code, found, said = ask("--resume")
        assert code == 0, found
        assert contents(output) == job[1]


def test_so_many_operations_are_there(ask: Callable[..., Answer], tmp_path: Path) -> None:
    with failing(10**9, as_python(errno.EIO), tmp_path / "out") as seen:
        assert ask()[0] == 0
    assert OPERATIONS <= seen[0] <= OPERATIONS + 6


def test_an_output_that_cannot_be_made_is_a_wrong_request(ask: Callable[..., Answer], tmp_path: Path) -> None:
    with failing(1, as_python(errno.EROFS), tmp_path / "out"):
        code, found, _ = ask()
    assert code == 2
    assert "out cannot be written: Read-only file system" in found["error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_output_that_vanishes_in_mid_run(
    job: Any, ask: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.weights import block_pass

    real, output = block_pass.run_block, tmp_path / "out"

    def vanish(one: Any, index: int, *rest: Any) -> Any:
        if index == 1:
            shutil.rmtree(output)
        return real(one, index, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(block_pass, "run_block", vanish)
        code, found, said = ask()
    assert code == 1, found
    assert str(output) in found["error"]
    assert "Traceback" not in said
    assert not (output / "compress.json").exists()
    code, found, _ = ask("--resume")
    assert code == 0, found
    assert contents(output) == job[1]


@pytest.mark.slow
def test_a_source_that_changes_between_two_runs(
    job: Any, ask: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, config, tokenizer or text: what was begun is not gone on with."""
    from compress.weights import block_pass

    def stop(one: Any, index: int, *rest: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(block_pass, "run_block", stop)
        code, found, _ = ask()
    assert code == 130
    assert "interrupted; finished work is kept: run the same command with --resume to continue" in found["error"]
    room = job[0].parent
    for name in ("model/model.safetensors", "model/config.json", "model/tokenizer.json", "text.txt"):
        before = (room / name).read_bytes()
        changed = bytearray(before)
        if name.endswith(".safetensors"):
            changed[-1000] ^= 1
        elif name == "model/config.json":
            changed = bytearray(before.replace(b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05'))
        elif name == "model/tokenizer.json":
            changed = bytearray(before.replace(b'"a": ', b'"\\u0000a": ', 1))
        else:
            changed = bytearray(before.replace(b"square", b"circle"))
        assert changed != before
        (room / name).write_bytes(changed)
        try:
            code, found, _ = ask("--resume")
            assert code == 2, (name, found)
            assert "a run with another" in found["error"], (name, found)
        finally:
            (room / name).write_bytes(before)
    code, found, _ = ask("--resume")
    assert code == 0, found
    assert contents(tmp_path / "out") == job[1]
