"""Modules of the user that have the names of our packages, in the directory that a command is started from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "import sys\nfrom compress.cli import main\nsys.exit(main())\n"  # as pip writes it


@pytest.fixture
def start(tmp_path: Path):
    """Runs Python in a directory that has a runtime.py and an export.py."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("runtime.py", "export.py"):
        (here / name).write_text("raise SystemExit('the code of the user was run')\n")

    def run(*arguments: str, first: str = "") -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, (first, str(ROOT))))
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=here, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
        )

    return run


def test_a_command_takes_its_own_packages(start, tmp_path: Path) -> None:
    (tmp_path / "compress").write_text(SCRIPT)
    for how in (["-m", "compress"], [str(tmp_path / "compress")]):
        done = start(*how, "export", "nothing")
        assert done.returncode == 2, done.stderr
        assert "--target is missing; give one of huggingface" in done.stderr


def test_what_shadows_them_is_said(start, tmp_path: Path) -> None:
    (tmp_path / "compress").write_text(SCRIPT)
    text = f"{tmp_path / 'here' / 'runtime.py'} shadows the package runtime of compress: rename it, or start from another directory"
    for how in (["-m", "compress"], [str(tmp_path / "compress")]):
        done = start(*how, "--version", first=str(tmp_path / "here"))
        assert (done.returncode, done.stderr) == (2, f"compress: {text}\n")
    (tmp_path / "here" / "mine.py").write_text("import compress")
    done = start("mine.py")
    assert done.stderr.splitlines()[-1] == f"ImportError: {text}"
