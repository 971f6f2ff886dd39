"""Checkpoints of the families as they are published, and artifacts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from family_models import FAMILIES
from safetensors.torch import load_file, save_file

import compress

W4 = {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32}}


def source(name: str, path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A checkpoint of one family with one file, stored in `dtype`."""
    family = next(family for family in FAMILIES if family.name == name)
    family.write(path)
    file = path / "model.safetensors"
    save_file(
        {n: t.to(dtype) if t.is_floating_point() else t for n, t in load_file(file).items()}, file, {"format": "pt"}
    )
    set_config(path, dtype=str(dtype).removeprefix("torch."))
    return path


def set_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def applied(model: Path, output: Path, *stages: dict[str, Any]) -> compress.AppliedArtifact:
    return compress.apply(
        {"name": "test", "model": str(model), "stages": list(stages) or [W4]}, output=output, quiet=True
    )
