"""The kernels in an export's directory: `kernels/index.json` and the files that it names.

The index is `{"schema_version": 1, "triton": version, "kernels": [...]}`; an entry has `file` and its `sha256`, `architecture`
("sm_90a"), `kernel` (`jit.Entry.name`), `source` (`jit.Entry.source`), `symbol` in the cubin, `arguments` (`signature.Argument`),
`options`, `num_warps`, `shared` (bytes of dynamic shared memory), `scratch_pointers` (that follow the arguments), and, for people,
`registers`, `spill_bytes`, `grid`, `bytes` and `ptx_sha256`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint.checkpoint import read_json
from runtime.errors import ArtifactError
from runtime.kernels.triton.signature import Argument, Variant

FOLDER, INDEX, SCHEMA_VERSION = "kernels", "index.json", 1


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel.

    Attributes:
        symbol: its name in the cubin. scratch: pointers that follow the arguments. threads: of a program.
        shared: bytes of dynamic shared memory.
    """

    variant: Variant
    architecture: str
    file: str
    sha256: str
    symbol: str
    source: str
    shared: int
    warps: int
    scratch: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


def runs_on(architecture: str, capability: int) -> bool:
    """Whether code for `sm_80`, `sm_90a` runs on a GPU: of the same major version and no younger; with an "a" only of that very one."""
    digits = architecture.removeprefix("sm_")
    if digits.endswith("a"):
        return int(digits[:-1]) == capability
    return int(digits) // 10 == capability // 10 and int(digits) <= capability


def read_index(directory: Path) -> list[Cubin]:
    """What `directory/kernels` holds; nothing where there is no index.

    Raises:
        ArtifactError: the index is damaged, of a newer version, or names files outside.
    """
    file = directory / FOLDER / INDEX
    if not file.is_file():
        return []
    content = read_json(file)
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ArtifactError(f"{file} has schema version {version!r}, this runtime reads {SCHEMA_VERSION}")
    listed = content.get("kernels")
    if not isinstance(listed, list):
        raise ArtifactError(f"{file} has no list of kernels")
    return [_cubin(given, f"{file}, kernel {i}") for i, given in enumerate(listed)]


def read_cubin(directory: Path, cubin: Cubin) -> bytes:
    """Content of the file; ArtifactError unless it is what the index says."""
    file = directory / FOLDER / cubin.file
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(data).hexdigest() != cubin.sha256:
        raise ArtifactError(f"{file} is corrupt: its content differs from the SHA-256 in {INDEX}")
    return data


def _cubin(given: Any, where: str) -> Cubin:
    """One entry of the index, checked."""
    if not isinstance(given, dict):
        raise ArtifactError(f"{where} is not an object")

    def text(name: str) -> str:
        value = given.get(name)
        if not isinstance(value, str) or not value:
            raise ArtifactError(f"{where}: {name} must be a text, not {value!r}")
        return value

    def number(name: str) -> int:
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise ArtifactError(f"{where}: {name} must be an integer >= 0, not {value!r}")
        return value

    arguments, options, file, architecture = (
        given.get("arguments"),
        given.get("options"),
        text("file"),
        text("architecture"),
    )
    if not isinstance(arguments, list) or not isinstance(options, dict):
        raise ArtifactError(f"{where}: arguments must be a list and options an object")
    if Path(file).name != file or "\\" in file:
        raise ArtifactError(f"{where}: file {file!r} must lie in {FOLDER}/")
    if re.fullmatch(r"sm_\d{2,3}a?", architecture) is None:
        raise ArtifactError(f"{where}: architecture {architecture!r} is none")
    made = tuple(Argument.from_dict(argument, where) for argument in arguments)
    variant = Variant(text("kernel"), made, tuple(sorted(options.items())))
    return Cubin(
        variant, architecture, file, text("sha256"), text("symbol"), text("source"),
        number("shared"), number("num_warps"), number("scratch_pointers"),
    )  # fmt: skip
