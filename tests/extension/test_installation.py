"""The package of extensions installs by itself, and processes that are started with it see it."""

from __future__ import annotations

from dataclasses import replace

import pytest

CODE = """
from importlib.metadata import version
import compress_extension
print(version("compress-extension"), compress_extension.__file__)
"""


@pytest.fixture
def fresh(extension):
    """Processes that import all by themselves."""
    return replace(extension, warm=False)


def test_processes_see_the_installed_package(fresh) -> None:
    version, file = fresh.python(CODE).stdout.split()
    assert version == "0.1.0"
    assert file.startswith(str(fresh.path)), "the copy that was installed, not the source"


def test_the_command_line_runs_beside_it(fresh) -> None:
    assert "apply" in fresh.compress("--help").stdout
