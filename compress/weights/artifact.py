"""Artifact of a weight plan: what becomes of every tensor of the source, and the config.json that says how layers are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from compress.model.stage import TensorPlan
from compress.weights.compatibility import foreign_layers
from compress.weights.plan import WeightPlan
from runtime import formats
from runtime.formats.quantization_config import build, entry_from_dict
from runtime.modeling.linear_modules import get_matrix


def tensors(weights: WeightPlan) -> list[TensorPlan]:
    """See `compress.model.stage.LayersJob.tensors`."""
    context = weights.context
    checkpoint, dtype = context.checkpoint, context.streamed.dtype
    whole = context.reference.checkpoint
    plans = []
    stored = {f"{name}.weight" for name in weights.tasks}
    for name in checkpoint.names():
        if name in checkpoint.dropped:
            plans.append(TensorPlan(name, "dropped", whole.nbytes(name), 0))
        elif name not in stored:
            plans.append(TensorPlan(name, "copied", whole.nbytes(name), checkpoint.nbytes(name)))
    if context.source is not None:
        gone = set(whole.names()) - set(checkpoint.names())
        plans += [TensorPlan(name, "removed", whole.nbytes(name), 0) for name in gone]
    for name, task in weights.tasks.items():
        weight = f"{name}.weight"
        rows, columns = get_matrix(context.streamed.model.get_submodule(name)).shape
        density = 1.0 - task.share
        storage = formats.choose(task.scheme, (rows, columns), density=density)
        size_after = storage.bytes_estimate(task.scheme, (rows, columns), dtype, density)
        size_before = whole.nbytes(weight) if checkpoint.has(weight) else 0
        plans.append(TensorPlan(weight, "compressed", size_before, size_after, task.describe(), storage.name))
    if weights.untie:
        for tied, source in context.streamed.ties.items():
            if not checkpoint.has(tied) and tied.rpartition(".")[0] not in weights.tasks and checkpoint.has(source):
                plans.append(TensorPlan(tied, "copied", 0, checkpoint.nbytes(source)))
    return sorted(plans, key=lambda plan: plan.name)


def config(weights: WeightPlan, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """See `compress.model.stage.LayersJob.config`."""
    context = weights.context
    entries = {name: entry_from_dict(value) for name, value in recorded.items()}
    found = dict(context.checkpoint.config)
    if entries:
        name = context.streamed.checkpoint.published_module
        model, parts = context.streamed.model, context.streamed.checkpoint.expert_tensors
        foreign = {name(module) for module in foreign_layers(model, entries, parts)}
        entries = {name(module): entry for module, entry in entries.items()}
        # Classes of models among them that do more than multiply (routers): as "Linear" compressed-tensors would mean them too.
        linear = {name(n): n for n, module in model.named_modules() if isinstance(module, nn.Linear)}
        # Matrices that the model has no place for: an engine that has one must not look for compressed weights there.
        source = context.checkpoint
        extra = [n.removesuffix(".weight") for n in context.streamed.extra if n.endswith(".weight")]
        linear |= {module: module for module in extra if len(source.shape(f"{module}.weight")) == 2}
        # Routers are no linear layers in transformers, and are in other engines.
        linear |= {name(module): module for module in _other_matrices(model) if name(module) not in entries}
        found["quantization_config"] = build(entries, linear, foreign, also=linear)
    if weights.untie:
        found["tie_word_embeddings"] = False
    return found


def _other_matrices(model: nn.Module) -> list[str]:
    """Modules with a matrix for a weight that are neither linear layers nor embeddings."""
    return [
        name
        for name, module in model.named_modules()
        if not isinstance(module, (nn.Linear, nn.Embedding))
        and isinstance(weight := getattr(module, "weight", None), nn.Parameter)
        and weight.dim() == 2
    ]
