"""Where a training run stands, on disk: weights, optimizer, the best so far, and the curve. Plain safetensors and JSON, never a pickle.

A checkpoint is a directory `step-NNNNNN` that is there whole or not at all. The last two are kept: a run whose newest is damaged goes on
from the one before. Nothing random is stored: every step begins from a seed of its own.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compress.core.files import directory_beside, disk_errors, intact, seal, write_json
from runtime.checkpoint.checkpoint import read_json
from runtime.errors import ArtifactError, RequestError

_log = logging.getLogger("compress")
_NAME = re.compile(r"step-(\d{6,})")
State = dict[str, torch.Tensor]


@dataclass
class Standing:
    """What a run goes on from.

    Attributes:
        step: steps done.
        weights: by name, those that are trained.
        optimizer: "NAME|KEY" of AdamW's state.
        best: weights at the best look so far; empty: there was none.
        facts: JSON-able: settings, curve, ...
    """

    step: int
    weights: State
    optimizer: State
    best: State
    facts: dict[str, Any]


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
    """AdamW's moments and step counts by the names of the weights."""
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


def save(directory: Path, standing: Standing) -> None:
    """Write a checkpoint, then remove all before it but the last."""
    target = directory / f"step-{standing.step:06d}"
    with disk_errors(f"writing {target}"), directory_beside(target) as temporary:
        for name in ("weights", "optimizer", "best"):
            save_file(getattr(standing, name), temporary / f"{name}.safetensors")
        write_json(temporary / "state.json", {**standing.facts, "step": standing.step})
        seal(temporary)
    for _, path in sorted(found for found in _found(directory) if found[0] < standing.step)[:-1]:
        shutil.rmtree(path)


def latest(directory: Path, settings: dict[str, Any], warn: Callable[[str], None] = _log.warning) -> Standing | None:
    """The newest checkpoint that is not damaged, or None. `warn` is told of those that are.

    Raises:
        RequestError: it is of a run with other settings.
    """
    for step, path in sorted(_found(directory), reverse=True):
        if intact(path):
            return _read(step, path, settings)
        warn(f"{path} is damaged: going on from what is before it")
    return None


def _read(step: int, path: Path, settings: dict[str, Any]) -> Standing:
    facts = read_json(path / "state.json")
    if facts.get("settings") != settings:
        odd = _difference(facts.get("settings"), settings)
        raise RequestError(f"{path} is of another training run ({odd}); remove it or train with the same settings")
    try:
        weights, optimizer, best = (
            load_file(path / f"{name}.safetensors") for name in ("weights", "optimizer", "best")
        )
    except Exception as error:  # safetensors raises its own type, and the operating system's
        raise ArtifactError(f"{path} is damaged: {error}") from error
    return Standing(step, weights, optimizer, best, facts)


def is_begun(directory: Path) -> bool:
    """Whether a run has left a checkpoint there."""
    return bool(_found(directory))


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
