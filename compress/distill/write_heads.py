"""A directory of trained heads: what `runtime.decoding.drafters.parts.files` describes and reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compress.distill.directory import draft_directory
from compress.distill.heads import HeadStudent
from runtime.decoding.drafters.parts.files import KEPT, METHODS, SCHEMA_VERSION, WEIGHTS
from runtime.errors import RequestError


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
    with draft_directory(directory, content) as temporary:
        save_file(tensors, temporary / WEIGHTS)
    return directory
