"""A directory of trained heads: what `runtime.decoding.drafters.parts.files` describes and reads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compress.distill.heads import HeadStudent
from compress.distill.write import DRAFT
from compress.pipeline.files import disk_errors, sha256, sync_directory, write_json
from runtime.decoding.drafters.parts.files import KEPT, METHODS, SCHEMA_VERSION, WEIGHTS
from runtime.errors import RequestError
from runtime.file_rights import let_others_read


def write_heads(
    directory: str | Path,
    student: HeadStudent,
    facts: Mapping[str, Any],
    *,
    method: str,
    rates: list[list[float]],
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write heads; the directory is there whole or not at all.

    Args:
        directory: new, or an earlier draft's, which is replaced.
        student: trained.
        facts: JSON-able: acceptance before and after, the curve, ...
        method: "medusa" or "mtp".
        rates: of `rank_rates`.
        dtype: of the stored weights; vectors that are no weights (rotations) stay float32.

    Returns:
        The directory.

    Raises:
        RequestError: the directory holds something else, the method is unknown, or the target has no fingerprint.
    """
    directory = Path(directory)
    fingerprint = student.features.teacher.fingerprint
    if method not in METHODS:
        raise RequestError(f"heads are of {', '.join(METHODS)}, not {method!r}")
    if not fingerprint:
        raise RequestError("heads need their target's fingerprint: another model's would not be refused")
    if directory.exists() and not (directory / DRAFT).is_file() and (directory.is_file() or any(directory.iterdir())):
        raise RequestError(f"{directory} is not empty and holds no draft; choose another directory")
    module: Any = student.draft.module
    parameters = dict(module.named_parameters())
    tensors = {
        name: value.detach().to("cpu", dtype if name in parameters else value.dtype).contiguous()
        for name, value in module.state_dict().items()
    }
    if student.kept is not None:
        tensors[KEPT] = student.kept.to("cpu", torch.int32)
    content = {
        "schema_version": SCHEMA_VERSION, "method": method, "target": fingerprint, "vocabulary": student.vocabulary,
        "hidden": student.features.parts.hidden, "heads": student.sizes, "rates": rates, "facts": dict(facts),
    }  # fmt: skip
    temporary = directory.with_name(f".{directory.name}.tmp")
    with disk_errors(f"writing {directory}"):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        file = temporary / WEIGHTS
        save_file(tensors, file)
        let_others_read(file)
        content["files"] = {WEIGHTS: {"bytes": file.stat().st_size, "sha256": sha256(file)}}
        write_json(temporary / DRAFT, content)
        sync_directory(temporary, files=True)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
        sync_directory(directory.parent)
    return directory
