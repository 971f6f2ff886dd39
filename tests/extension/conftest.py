"""The package `compress_extension`, installed into a directory of its own, and processes that see it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm_python import python

HOME = Path(__file__).parent


@dataclass(frozen=True)
class Extension:
    """The installed package.

    Attributes:
        path: directory that `pip install --target` filled.
        warm: processes are those of `warm_python`.
    """

    path: Path
    warm: bool = True

    def python(self, code: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `python -c code arguments...` where the package is installed; with `check` it must exit with 0."""
        return self._run(["-c", code, *map(str, arguments)], check)

    def compress(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command line likewise."""
        return self._run(["-m", "compress", *map(str, arguments)], check)

    def _run(self, command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        seen = [str(self.path), str(HOME.parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in seen if path)}
        interpreter = python() if self.warm else sys.executable
        done = subprocess.run([interpreter, *command], env=environment, capture_output=True, text=True, timeout=240)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="session")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Extension:
    """`tests/extension`, installed as a user would, but without a network."""
    target = tmp_path_factory.mktemp("site-packages")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(HOME)], check=True, timeout=240)
    return Extension(target)
