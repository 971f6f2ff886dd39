"""Write a dense checkpoint out of any module tree, and time the phases of a run. Imported by the runner of every tool.

Runs inside each tool's own environment, so it needs nothing but torch, transformers and safetensors.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


class Phases:
    """Wall time of the named parts of a run, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, name: str) -> None:
        """The part that ends now is called `name`."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now


def read_calibration(path: str | Path) -> list[list[int]]:
    """Rows of token ids, all of one length."""
    rows: list[list[int]] = json.loads(Path(path).read_text())["input_ids"]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"{path}: the calibration rows differ in length")
    return rows


def write_dense(source: str | Path, tensors: Mapping[str, torch.Tensor], output: str | Path) -> None:
    """Write `tensors` as a plain bfloat16 checkpoint with the configuration and tokenizer of `source`.

    Args:
        source: the original checkpoint; its configuration is used, so nothing a tool put into its own stays.
        tensors: name in the original checkpoint -> value; extra names (scales and the like) are an error.
        output: directory, made when absent.
    """
    source, output = Path(source), Path(output)
    output.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    config["dtype"] = "bfloat16"
    config.pop("torch_dtype", None)
    expected = checkpoint_names(source)
    given = {name: value for name, value in tensors.items() if name in expected}
    if missing := expected - set(given):
        raise ValueError(f"{len(missing)} tensors of the source are absent, {sorted(missing)[0]} is the first")
    unknown = {name for name in tensors if name not in expected and name != "lm_head.weight"}
    if unknown:
        raise ValueError(f"{len(unknown)} tensors are not in the source, {sorted(unknown)[0]} is the first")
    dense = {name: value.detach().to(torch.bfloat16).contiguous().clone() for name, value in given.items()}
    save_file(dense, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, output / name)


def checkpoint_names(path: str | Path) -> set[str]:
    """Tensor names of a safetensors checkpoint."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            names |= set(handle.keys())
    return names


def write_report(path: str | Path, phases: Phases, **facts: Any) -> None:
    """The runner's own account: seconds of each phase, and the settings and versions it ran with."""
    Path(path).write_text(json.dumps({"phases": phases.seconds, **facts}, indent=2, default=str))


def run(
    description: str | None,
    compress: Callable[[dict[str, Any], Phases], None],
    export: Callable[[dict[str, Any]], None],
) -> None:
    """The command line of a tool's runner: compress the cell of `--config`, or write dense what was compressed (`--export`)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--export", action="store_true")
    arguments = parser.parse_args()
    phases = Phases()
    config = json.loads(arguments.config.read_text())
    if arguments.export:
        export(config)
    else:
        compress(config, phases)
