"""Layers for multi-token prediction that a checkpoint stores behind its last block (DeepSeek-V3 and others): transformers leaves them out,
other engines use them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def prediction_tensors(stacks: Iterable[tuple[str, nn.ModuleList]], names: Iterable[str]) -> set[str]:
    """Those of the stored `names` that belong to such a layer.

    It has a number behind the last block's, and something that no block has (what joins a hidden state with an embedding). A layer of
    nothing but what the blocks have is no such layer: config.json says too few then.

    Args:
        stacks: (name, blocks) of `runtime.skeleton.find_stacks`.
    """
    found: set[str] = set()
    stored = list(names)
    for stack, blocks in stacks:
        prefix = f"{stack}."
        layers: dict[str, dict[str, str]] = {}
        for name in stored:
            number, _, local = name[len(prefix) :].partition(".") if name.startswith(prefix) else ("", "", "")
            if number.isdigit() and int(number) >= len(blocks):
                layers.setdefault(number, {})[local] = name
        if not layers:
            continue
        usual = {local for name in stored if name.startswith(prefix) for local in [_local(name, prefix, len(blocks))]}
        for tensors in layers.values():
            if tensors.keys() - usual:
                found |= set(tensors.values())
    return found


def _local(name: str, prefix: str, count: int) -> str:
    """What a block calls its tensor; empty of one that is in no block."""
    number, _, local = name[len(prefix) :].partition(".")
    return local if number.isdigit() and int(number) < count else ""
