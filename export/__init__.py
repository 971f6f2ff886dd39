"""Export of artifacts to other engines: one folder per target, every export verified by loading it back.

`export.export(artifact, target="onnx")` writes and verifies; `export.fitting(artifact)` lists the targets that fit and why the
others do not. Heavy imports wait until a function is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.run import Exported

__all__ = ["export", "fitting"]


def export(
    artifact: str | Path,
    target: str,
    output: str | Path | None = None,
    *,
    verify: bool = True,
    overwrite: bool = False,
    quiet: bool = False,
    trust_remote_code: bool = False,
    **options: Any,
) -> Exported:
    """Write an artifact (or an uncompressed checkpoint) for another engine, and verify it by loading it back.

    Args:
        artifact: directory of the artifact.
        target: a name of `export.targets.names()`, such as "onnx", "tensorrt", "huggingface", "gguf", "triton".
        output: directory to write, new or empty; None: `<artifact>-<target>` beside the artifact.
        verify: load the export back and compare tokens and KL divergence with the artifact.
        overwrite: replace an earlier export in `output`.
        quiet: no progress on stderr.
        trust_remote_code: run Python code that the checkpoint brings.
        options: of the target (docs: reference, export targets).

    Returns:
        What was written, converted and measured.

    Raises:
        runtime.errors.RequestError: the request is wrong, or the target cannot hold the artifact; nothing was written.
        runtime.errors.CompressError: writing failed, or the export does not compute what the artifact does; nothing is left.
    """
    from export.run import run

    return run(artifact, target, output, verify, overwrite, quiet, trust_remote_code, options)


def fitting(artifact: str | Path, trust_remote_code: bool = False) -> dict[str, str | None]:
    """{target: None where it fits the artifact, else the reason why it does not}, with each target's default options."""
    from export.run import fitting as find

    return find(artifact, trust_remote_code)
