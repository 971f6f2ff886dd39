"""Training checkpoints: weights, AdamW's state, the best weights so far and the curve, as safetensors and JSON, never a pickle.

A checkpoint is a directory `step-NNNNNN` that is there whole or not at all. The last two are kept: a run whose newest is damaged resumes
from the one before. Nothing random is stored: every step begins from a seed of its own.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compress.core.files import directory_beside, disk_errors, intact, seal, write_json
from runtime.checkpoint.checkpoint import read_json
from runtime.errors import RequestError

_log = logging.getLogger("compress")
_NAME = re.compile(r"step-(\d{6,})")
State = dict[str, torch.Tensor]


def trained_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that ask for gradients, tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def copied(weights: dict[str, nn.Parameter]) -> State:
    """A copy in the CPU's memory."""
    return {name: value.detach().cpu().clone() for name, value in weights.items()}


def restore(weights: dict[str, nn.Parameter], state: State) -> None:
    """Put a copy's numbers back, in place."""
    with torch.no_grad():
        for name, value in weights.items():
            value.copy_(state[name])


def optimizer_state(optimizer: torch.optim.Optimizer, weights: dict[str, nn.Parameter]) -> State:
    """AdamW's moments and step counts, as "NAME OF THE WEIGHT|KEY"."""
    return {
        f"{name}|{key}": value.detach().cpu().clone()
        for name, parameter in weights.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, weights: dict[str, nn.Parameter], state: State) -> None:
    """Give AdamW back what `optimizer_state` took."""
    for joined, value in state.items():
        name, _, key = joined.rpartition("|")
        parameter = weights[name]
        # Step counts stay on the CPU, as AdamW keeps them.
        optimizer.state[parameter][key] = value if value.dim() == 0 else value.to(parameter.device)


def save(directory: Path, facts: dict[str, Any], **tensors: State) -> None:
    """Write the checkpoint of `facts["step"]`, then remove all before it but the last.

    Args:
        facts: JSON-able: "step", "settings" that a run must share to resume from it, the curve.
        tensors: each a file; `weights`, `optimizer`, `best`.
    """
    target = directory / f"step-{facts['step']:06d}"
    with disk_errors(f"writing {target}"), directory_beside(target) as temporary:
        for name, state in tensors.items():
            save_file(state, temporary / f"{name}.safetensors")
        write_json(temporary / "state.json", facts)
        seal(temporary)
    for _, path in sorted(found for found in _found(directory) if found[0] < facts["step"])[:-1]:
        shutil.rmtree(path)


def latest(directory: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, State]] | None:
    """Facts and tensors of the newest checkpoint that is not damaged, or None.

    Raises:
        RequestError: it is of a run with other settings.
    """
    for _, path in sorted(_found(directory), reverse=True):
        if not intact(path):
            _log.warning(f"{path} is damaged: resuming from the checkpoint before it")
            continue
        facts = read_json(path / "state.json")
        if facts["settings"] != settings:
            odd = _difference(facts["settings"], settings)
            raise RequestError(f"{path} is of another training run ({odd}); remove it or train with the same settings")
        return facts, {file.stem: load_file(file) for file in path.glob("*.safetensors")}
    return None


def _found(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    matches = [(_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    return [(int(match[1]), path) for match, path in matches if match]


def _difference(found: Any, wanted: Any, where: str = "") -> str:
    """The first place where two settings differ, in words."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in {**wanted, **found}:
            if found.get(key) != wanted.get(key):
                return _difference(found.get(key), wanted.get(key), f"{where}.{key}" if where else key)
    text = [repr(value) if len(repr(value)) < 60 else "something else" for value in (found, wanted)]
    return f"{where} is {text[0]} there, {text[1]} here"
