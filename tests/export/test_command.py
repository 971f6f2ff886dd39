"""`compress export`: what is printed, what is refused and how, what is left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from compress.cli import main
from export import folder, targets
from export.source import Source
from export.target import Job, Target, missing_packages
from runtime.system.distribution import how_to_install

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
    assert "tensorrt?" in sentence(err)
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_no_target_names_all(run: Run, tiny_artifact: Path) -> None:
    code, _, err = run("export", tiny_artifact)
    assert code == 2
    assert all(name in sentence(err) for name in targets.names())


def test_an_option_of_another_target(run: Run, tiny_artifact: Path, tmp_path: Path) -> None:
    code, _, err = run("export", tiny_artifact, "-t", "gguf", "--ort", "-o", tmp_path / "out")
    assert code == 2
    assert all(word in sentence(err) for word in ("gguf", "ort", "onnx"))
    code, _, err = run("export", tiny_artifact, "-t", "onnx", "--set", "dtype=float17", "-o", tmp_path / "out")
    assert code == 2
    assert all(word in sentence(err) for word in ("dtype", "onnx"))
    assert "float32" in sentence(err)
    code, _, err = run("export", tiny_artifact, "-t", "onnx", "--set", "dtype", "-o", tmp_path / "out")
    assert code == 2
    assert "OPTION=VALUE" in sentence(err)


@pytest.mark.parametrize("output", ["file/out", "file/new/out", "x" * 300, "x" * 250, "new/" + "x" * 300])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_output_that_cannot_be(run: Run, tiny_artifact: Path, tmp_path: Path, output: str, as_json: bool) -> None:
    (tmp_path / "file").write_text("mine")
    flags = ["--json"] if as_json else []
    code, out, err = run("export", tiny_artifact, "-t", "huggingface", "-o", tmp_path / output, *flags)
    assert code == 2
    assert "cannot be written: " in sentence(err)
    assert ("File name too long" if "x" in output else "is a file") in sentence(err)
    assert json.loads(out)["exit_code"] == 2 if as_json else out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("what", ["file", "foreign", "earlier", "itself"])
def test_an_output_that_is_taken(run: Run, tiny_artifact: Path, tmp_path: Path, what: str) -> None:
    output = tmp_path / "out"
    if what == "file":
        output.write_text("mine")
    elif what == "itself":
        output = tiny_artifact
    else:
        output.mkdir()
        (output / ("export.json" if what == "earlier" else "notes.txt")).write_text('{"format": "compress-export"}')
    before = sorted(path.name for path in output.parent.iterdir())
    code, _, err = run("export", tiny_artifact, "-t", "huggingface", "-o", output)
    assert code == 2
    word = {"file": "file", "foreign": "empty", "earlier": "--overwrite", "itself": "itself"}[what]
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


@pytest.mark.parametrize("name", targets.names())
@pytest.mark.parametrize("path", ["x" * 300, "y/" * 3000])
def test_an_artifact_that_cannot_be(run: Run, name: str, path: str) -> None:
    code, _, err = run("export", path, "-t", name)
    assert code == 2
    assert sentence(err).endswith("cannot be read: File name too long")
    assert len(err) < 400


# Started in a process of its own, in which no target's packages are installed: nothing finds them.
WITHOUT = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in packages else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

artifact, packages, *names = sys.argv[1:]
packages = packages.split(",")
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
from compress.cli import main
for name in names:
    print("exit code", main(["export", artifact, "--target", name, "--output", "new/out"]), file=sys.stderr)
"""
PACKAGES = {name: targets.get(name).packages for name in targets.names()}


def _needs(name: str, packages: Sequence[str]) -> str:
    extra = targets.get(name).extra
    how = how_to_install(extra) if extra else f"pip install {' '.join(packages)}"
    which = "which is" if len(packages) == 1 else "which are"
    return f"compress: target {name} needs {', '.join(packages)}, {which} not installed: {how}"


@pytest.mark.slow
def test_without_its_packages_every_target_names_its_extra(made: Callable[..., Path], tmp_path: Path) -> None:
    hidden = ",".join(package for packages in PACKAGES.values() for package in packages)
    command = [sys.executable, "-c", WITHOUT, str(made("w4_g128_positive")), hidden, *PACKAGES]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    expected = [line for name, packages in PACKAGES.items() for line in (_needs(name, packages), "exit code 2")]
    assert result.stderr.splitlines() == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "package"), [(name, package) for name, packages in PACKAGES.items() for package in packages]
)
def test_one_missing_package_is_named_with_its_extra(
    run: Run, made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    def find_spec(asked: str) -> object:
        return None if asked == package else asked

    monkeypatch.setattr("export.target.importlib", SimpleNamespace(util=SimpleNamespace(find_spec=find_spec)))
    code, _, err = run("export", made("w4_g128_positive"), "-t", name, "-o", tmp_path / "new" / "out")
    assert code == 2
    assert sentence(err) == _needs(name, [package])
    assert list(tmp_path.iterdir()) == []


def test_every_extra_is_one_of_this_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n\n")[0]
    named = {extra for name in targets.names() if (extra := targets.get(name).extra) is not None}
    assert named >= {"onnx", "tensorrt", "gguf", "gpu"}
    assert all(f"\n{extra} = [" in extras for extra in named)


def test_a_missing_extra_is_listed(run: Run, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(targets.get("gguf")), "packages", ("a_module_nobody_has",))
    code, out, _ = run("export", tiny_artifact, "--list", "--json")
    assert code == 0
    assert how_to_install("gguf") in json.loads(out)["targets"]["gguf"]["reason"]


@pytest.mark.parametrize("name", targets.names())
def test_the_disk_is_too_small(
    run: Run, made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    missing = missing_packages(targets.get(name).packages)
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    artifact = made("w4_g128_positive")
    needed = targets.get(name).bytes_needed(Source(artifact), targets.get(name).options())
    assert needed > Source(artifact).bytes
    usage = type("Usage", (), {"free": needed - 1})()
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: usage)
    code, _, err = run("export", artifact, "-t", name, "-o", tmp_path / "new" / "out")
    assert code == 1
    assert "GB free" in sentence(err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("step", ["write", "verify"])
def test_the_disk_fills_up(
    run: Run, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    target = type(targets.get("huggingface"))

    def fail(self: Target, job: Job) -> None:
        (job.folder / "half").write_text("written")
        raise error

    monkeypatch.setattr(target, step, fail)
    code, out, err = run("export", tiny_artifact, "-t", "huggingface", "-o", tmp_path / "new" / "out", "--json")
    assert code == json.loads(out)["exit_code"] == 1
    assert "disk is full" in sentence(err)
    assert list(tmp_path.iterdir()) == []


def test_an_artifact_that_cannot_be_read_is_not_the_outputs_fault(
    run: Run, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: Target, job: Job) -> None:
        raise OSError(errno.EIO, "Input/output error", str(tiny_artifact / "model.safetensors"))

    monkeypatch.setattr(type(targets.get("huggingface")), "write", write)
    code, _, err = run("export", tiny_artifact, "-t", "huggingface", "-o", tmp_path / "new" / "out")
    assert code == 1
    assert sentence(err) == f"compress: Input/output error ({tiny_artifact}/model.safetensors)"
    assert list(tmp_path.iterdir()) == []


STOPPED = """
import sys, time
from compress.cli import main
from export.huggingface.target import HuggingFaceTarget

def verify(self, job):
    print("written", flush=True)
    time.sleep(60)

HuggingFaceTarget.verify = verify
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_stopping_leaves_nothing(tiny_artifact: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "out"
    command = [sys.executable, "-c", STOPPED, "export", tiny_artifact, "-t", "huggingface", "-o", output]
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        written = sorted(entry.name for entry in output.parent.iterdir())
        assert len(written) == 2, written  # the lock, and what is being written
        assert ".out.lock" in written
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert sentence(err.decode()) == "compress: stopped by SIGTERM"
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
    assert "wrote none" in sentence(err)
    recipe = work / "r.yaml"
    recipe.write_text(
        f"name: r\nmodel: {tiny_llama()}\nstages:\n  - quantize: {{method: rtn, bits: 4, group_size: 32}}\noutput: out/r\n"
    )
    assert run("apply", recipe, "-q", "--prompt", "", "--output", "out/r")[0] == 0
    code, out, err = run("export", "--list")
    assert code == 0
    assert "out/r" in err
    assert "out/r" in out
    code, out, err = run("export", "-t", "huggingface", "--no-verify", "-q")
    assert code == 0
    assert err == "", "-q: no progress on stderr"
    assert "\nout/r written to " in out, "which artifact was chosen is said all the same"
    code, out, err = run("export", "-t", "huggingface", "--no-verify", "--overwrite", "--json")
    assert code == 0
    assert err == ""
    assert json.loads(out)["artifact"] == "out/r"


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--list"], ["--target", "huggingface"]])
def test_an_export_is_not_exported_again(
    made: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    pytest.importorskip("onnxruntime")
    import export

    export.export(made("w4_g128"), "onnx", tmp_path / "out", quiet=True, verify=False)
    assert main(["export", str(tmp_path / "out"), *more]) == 2
    assert "export to onnx" in capsys.readouterr().err
