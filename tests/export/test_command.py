"""`compress export`: what is printed, what is refused and how, what is left behind."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.cli import main
from export import folder, targets
from export.target import Target

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("export", ...)`: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def sentence(err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith("compress: ")]
    assert len(lines) == 1, err
    return lines[0]


def test_the_nearest_target_is_suggested(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    code, out, err = run("export", tiny_artifact, "--target", "tensort", "--output", tmp_path / "out")
    assert code == 2
    assert "did you mean tensorrt?" in sentence(err)
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_no_target_names_all(run: Run, tiny_artifact: Path) -> None:
    code, _, err = run("export", tiny_artifact)
    assert code == 2
    assert all(name in sentence(err) for name in targets.names())


def test_an_option_of_another_target(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    code, _, err = run("export", tiny_artifact, "-t", "gguf", "--ort", "-o", tmp_path / "out")
    assert code == 2
    assert "target gguf has no option ort; it belongs to onnx" in sentence(err)
    code, _, err = run("export", tiny_artifact, "-t", "onnx", "--set", "dtype=float17", "-o", tmp_path / "out")
    assert code == 2
    assert "option dtype of target onnx" in sentence(err)
    assert "float32" in sentence(err)
    code, _, err = run("export", tiny_artifact, "-t", "onnx", "--set", "dtype", "-o", tmp_path / "out")
    assert code == 2
    assert "OPTION=VALUE" in sentence(err)


@pytest.mark.parametrize("what", ["file", "foreign", "earlier", "itself"])
def test_an_output_that_is_taken(run: Run, tiny_artifact: Path, tmp_path: Path, what: str) -> None:
    output = tmp_path / "out"
    if what == "file":
        output.write_text("mine")
    elif what == "itself":
        output = tiny_artifact
    else:
        output.mkdir()
        (output / ("export.json" if what == "earlier" else "notes.txt")).write_text("{}")
    before = sorted(path.name for path in output.parent.iterdir())
    code, _, err = run("export", tiny_artifact, "-t", "huggingface", "-o", output)
    assert code == 2
    word = {"file": "is a file", "foreign": "not empty", "earlier": "--overwrite", "itself": "artifact itself"}[what]
    assert word in sentence(err)
    assert sorted(path.name for path in output.parent.iterdir()) == before


def test_overwriting_an_earlier_export(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run("export", tiny_artifact, "-t", "huggingface", "-o", output, "-q")[0] == 0
    (output / "config.json").unlink()
    code, out, _ = run("export", tiny_artifact, "-t", "huggingface", "-o", output, "-q", "--overwrite", "--json")
    assert code == 0
    result = json.loads(out)
    assert result["path"] == str(output)
    assert result["verification"]["metrics"]["same_tokens"] > 0
    assert (output / "config.json").is_file()


def test_nothing_is_there(run: Run, tmp_path: Path) -> None:
    code, _, err = run("export", tmp_path / "nothing", "-t", "onnx")
    assert code == 2
    assert "does not exist" in sentence(err)


def test_a_missing_extra_is_named(
    run: Run, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets.get("gguf")
    monkeypatch.setattr(type(target), "packages", ("a_module_nobody_has",))
    code, _, err = run("export", tiny_artifact, "-t", "gguf", "-o", tmp_path / "out")
    assert code == 2
    assert 'pip install "compress[gguf]"' in sentence(err)
    code, out, _ = run("export", tiny_artifact, "--list", "--json")
    assert code == 0
    assert "compress[gguf]" in json.loads(out)["targets"]["gguf"]["reason"]


def test_the_disk_is_too_small(run: Run, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: usage)
    code, _, err = run("export", tiny_artifact, "-t", "huggingface", "-o", tmp_path / "out")
    assert code == 1
    assert "free" in sentence(err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("No space left on device")]
)
def test_the_disk_fills_up(
    run: Run, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    target = type(targets.get("huggingface"))

    def write(self: Target, job: object) -> None:
        (job.folder / "half").write_text("written")  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(target, "write", write)
    code, _, err = run("export", tiny_artifact, "-t", "huggingface", "-o", tmp_path / "out")
    assert code == 1
    assert "disk is full" in sentence(err)
    assert list(tmp_path.iterdir()) == []


def test_the_list(run: Run, tiny_artifact: Path) -> None:
    code, out, _ = run("export", tiny_artifact, "--list", "--json")
    assert code == 0
    found = json.loads(out)["targets"]
    assert set(found) == set(targets.names())
    assert found["huggingface"]["fits"] is True
    assert found["tensorrt"]["fits"] is False  # groups of 32
    assert "32" in found["tensorrt"]["reason"]
    code, out, _ = run("export", tiny_artifact, "--list")
    assert code == 0
    assert "groups of 32" in " ".join(out.split())


def test_the_last_artifact_is_found(
    run: Run, tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    code, _, err = run("export", "--list")
    assert code == 2
    assert "has written none" in sentence(err)
    recipe = work / "r.yaml"
    recipe.write_text(
        f"name: r\nmodel: {tiny_llama()}\nstages:\n  - quantize: {{method: rtn, bits: 4, group_size: 32}}\noutput: out/r\n"
    )
    assert run("apply", recipe, "-q", "--prompt", "", "--output", "out/r")[0] == 0
    code, out, err = run("export", "--list")
    assert code == 0
    assert "out/r" in err
    assert "out/r" in out
