"""Index of compiled kernels in an export's directory: `kernels/index.json` and the files that it names.

The index is `{"schema_version": 2, "triton": version, "kernels": [...]}`; an entry has `file` and its `sha256`, `architecture`
("sm_90a"), `kernel` (`jit.Entry.name`), `source` (`jit.Entry.source`), `symbol` in the cubin, `arguments` (name to code, see
`signature.Variant`), `options`, `num_warps`, `shared` (bytes of dynamic shared memory), `scratch_pointers` (that follow the
arguments), and, for people, `registers`, `spill_bytes`, `bytes` and `ptx_sha256`.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint.checkpoint import read_json
from runtime.checkpoint.locate import reading
from runtime.config.settings import ConfigError, Natural, Text, read
from runtime.errors import ArtifactError
from runtime.kernels.triton.signature import Variant

FOLDER, INDEX, SCHEMA_VERSION = "kernels", "index.json", 2
_log = logging.getLogger("compress.kernels")
_FIELDS = {
    **dict.fromkeys(("file", "sha256", "architecture", "kernel", "source", "symbol"), Text),
    **dict.fromkeys(("shared", "num_warps", "scratch_pointers"), Natural),
}


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel.

    Attributes:
        symbol: its name in the cubin. source: `jit.Entry.source` of what it was compiled from.
        shared: bytes of dynamic shared memory. num_warps: of a program. scratch_pointers: pointers that follow the arguments.
    """

    variant: Variant
    file: str
    sha256: str
    architecture: str
    source: str
    symbol: str
    shared: int
    num_warps: int
    scratch_pointers: int

    @property
    def threads(self) -> int:
        """Of a program."""
        return 32 * self.num_warps


def runs_on(architecture: str, capability: int) -> bool:
    """Whether code for `sm_80`, `sm_90a` runs on a GPU: of the same major version and no younger; with an "a" only of that very one."""
    digits = architecture.removeprefix("sm_")
    if digits.endswith("a"):
        return int(digits[:-1]) == capability
    return int(digits) // 10 == capability // 10 and int(digits) <= capability


def read_index(directory: Path) -> list[Cubin]:
    """The kernels in `directory/kernels`; none where there is no index, or one of an earlier version, which the log says.

    Raises:
        ArtifactError: the index is damaged, of a newer version, or names files outside.
    """
    file = directory / FOLDER / INDEX
    if not file.is_file():
        return []
    content = read_json(file)
    version, listed = content.get("schema_version"), content.get("kernels")
    if version == 1:
        _log.warning("kernels in %s were written by an earlier version and are not used; export again", directory)
        return []
    if version != SCHEMA_VERSION:
        raise ArtifactError(f"{file} has schema version {version!r}, this runtime reads {SCHEMA_VERSION}")
    if not isinstance(listed, list):
        raise ArtifactError(f"{file} has no list of kernels")
    return [_cubin(given, f"{file}, kernel {i}") for i, given in enumerate(listed)]


def read_cubin(directory: Path, cubin: Cubin) -> bytes:
    """Content of the file; ArtifactError unless it is what the index says."""
    file = directory / FOLDER / cubin.file
    with reading(file):
        data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != cubin.sha256:
        raise ArtifactError(f"{file} is corrupt: its content differs from the SHA-256 in {INDEX}")
    return data


def _cubin(given: Any, where: str) -> Cubin:
    """One entry of the index, checked."""
    if not isinstance(given, dict):
        raise ArtifactError(f"{where} is not an object")
    try:
        values = {name: read(kind, given.get(name), (name,)) for name, kind in _FIELDS.items()}
    except ConfigError as error:
        raise ArtifactError(f"{where}: {error}") from None
    arguments, options = given.get("arguments"), given.get("options")
    if not isinstance(arguments, dict) or not isinstance(options, dict):
        raise ArtifactError(f"{where}: arguments and options must be objects")
    if Path(values["file"]).name != values["file"] or "\\" in values["file"]:
        raise ArtifactError(f"{where}: file {values['file']!r} must lie in {FOLDER}/")
    if re.fullmatch(r"sm_\d{2,3}a?", values["architecture"]) is None:
        raise ArtifactError(f"{where}: architecture {values['architecture']!r} is none")
    return Cubin(Variant.read(values.pop("kernel"), arguments, options, where), **values)
