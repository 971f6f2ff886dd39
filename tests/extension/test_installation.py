"""The package of extensions installs by itself, and processes that are started with it see it."""

from __future__ import annotations

CODE = """
from importlib.metadata import version
import compress_extension
print(version("compress-extension"), compress_extension.__file__)
"""


def test_processes_see_the_installed_package(extension) -> None:
    version, file = extension.python(CODE).stdout.split()
    assert version == "0.1.0"
    assert file.startswith(str(extension.path)), "the copy that was installed, not the source"


def test_the_command_line_runs_beside_it(extension) -> None:
    assert "apply" in extension.compress("--help").stdout
