"""Artifact of a weight plan: what becomes of every tensor of the source, and the config.json that says how layers are stored."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.model.checkpoint_writer import write_zeros
from compress.model.stage import TensorPlan
from compress.weights.plan import Budget, WeightPlan
from runtime import formats
from runtime.errors import RequestError
from runtime.formats.quantization_config import ModuleEntry, build, entry_from_dict, entry_to_dict, needs_dense_loading
from runtime.modeling.experts import Experts, expert_of
from runtime.modeling.linear_modules import get_matrix, is_linear, sides
from runtime.modeling.unstored_buffers import initialiser
from runtime.system.sizes import size

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tensors(weights: WeightPlan) -> list[TensorPlan]:
    """See `compress.model.stage.LayersJob.tensors`."""
    context = weights.context
    checkpoint, dtype = context.checkpoint, context.streamed.dtype
    whole = context.reference.checkpoint
    unstored = {name for name in context.reference.ties if not whole.has(name)}

    def bytes_before(name: str) -> int:
        return 0 if name in unstored else whole.nbytes(name)  # a stage may have given the head a weight of its own

    plans = []
    stored = {f"{name}.weight" for name in weights.tasks}
    for name in checkpoint.names():
        if name in checkpoint.dropped:
            plans.append(TensorPlan(name, "dropped", bytes_before(name), 0))
        elif name not in stored:
            plans.append(TensorPlan(name, "copied", bytes_before(name), checkpoint.held_bytes(name)))
    if context.source is not None:
        gone = set(whole.names()) - set(checkpoint.names())
        plans += [TensorPlan(name, "removed", whole.nbytes(name), 0) for name in gone]
    for name, task in weights.tasks.items():
        weight = f"{name}.weight"
        rows, columns = get_matrix(context.streamed.model.get_submodule(name)).shape
        density = 1.0 - task.share
        storage = formats.choose(task.scheme, (rows, columns), density=density)
        size_after = storage.bytes_estimate(task.scheme, (rows, columns), dtype, density)
        size_before = bytes_before(weight) if checkpoint.has(weight) else 0
        values = task.candidates[0].weights if task.candidates else task.scheme.weights
        bits = 8.0 * dtype.itemsize if values is None else values.bits
        how = (task.describe(), storage.name, bits, task.share)
        plans.append(TensorPlan(weight, "compressed", size_before, size_after, *how))
    if weights.untie:
        for tied, source in context.streamed.ties.items():
            if not checkpoint.has(tied) and tied.rpartition(".")[0] not in weights.tasks and checkpoint.has(source):
                plans.append(TensorPlan(tied, "copied", 0, checkpoint.held_bytes(source)))
    if weights.budget is not None:
        _expect(weights, weights.budget, plans)
    return sorted(plans, key=lambda plan: plan.name)


# Before a budget is spent, its layers are taken to share it evenly.


def _expect(weights: WeightPlan, budget: Budget, plans: list[TensorPlan]) -> None:
    """Give tensors of layers that share a budget their part of it; by `max_kl` they may take all that the candidate of most bits does."""
    open_ = {f"{name}.weight" for name, task in weights.tasks.items() if task.candidates}
    own = [plan for plan in plans if plan.name in open_]
    counts = _counts(weights)
    rest = sum(plan.bytes_after for plan in plans) - sum(plan.bytes_after for plan in own)
    allowed = _allowed(budget, sum(counts.values()), rest)
    if allowed is None:
        return
    share = allowed / sum(plan.bytes_after for plan in own)
    for plan in own:
        plan.bytes_after = int(share * plan.bytes_after)
        plan.bits = max(plan.bits or 0.0, 8.0 * allowed / sum(counts.values()))


def _allowed(budget: Budget, count: int, rest: int) -> int | None:
    """Bytes that `count` weights may take beside tensors of `rest` bytes; None: as many as it takes."""
    if budget.key == "max_kl":
        return None
    return int(budget.amount * count / 8) if budget.key == "bits" else int(budget.amount) - rest


def _counts(weights: WeightPlan) -> dict[str, int]:
    """Weights of each layer that shares the budget."""
    found = {
        name: weights.context.streamed.model.get_submodule(name)
        for name, task in weights.tasks.items()
        if task.candidates
    }
    return {name: get_matrix(module).numel() for name, module in found.items()}


def budget_bytes(weights: WeightPlan, budget: Budget, names: Collection[str]) -> int | None:
    """Bytes that layers `names` may take, of all that share the budget: the others stay as they are; None: as many as it takes."""
    counts = _counts(weights)
    chosen = sum(counts[name] for name in names)
    if budget.key != "size":
        return _allowed(budget, chosen, 0)
    open_ = {f"{name}.weight" for name in counts}
    unplanned = replace(weights, tasks={name: task for name, task in weights.tasks.items() if name not in counts})
    rest = sum(plan.bytes_after for plan in tensors(unplanned) if plan.name not in open_)
    itemsize = weights.context.streamed.dtype.itemsize
    return _allowed(budget, chosen, rest + itemsize * (sum(counts.values()) - chosen))


def candidate_bytes(weights: WeightPlan) -> list[int]:
    """Bytes of all layers that share the budget, by candidate; of pruned layers about."""
    context, found = weights.context, list[int]()
    for name, task in weights.tasks.items():
        rows, columns = get_matrix(context.streamed.model.get_submodule(name)).shape
        for number, scheme in enumerate(task.candidates):
            density = 1.0 - task.share
            storage = formats.choose(scheme, (rows, columns), density=density)
            found += [0] if number == len(found) else []
            found[number] += storage.bytes_estimate(scheme, (rows, columns), context.streamed.dtype, density)
    return found


def check_budget(weights: WeightPlan) -> None:
    """RequestError where the budget is less than the smallest candidate takes, or more than the largest does."""
    budget = weights.budget
    if budget is None or budget.key == "max_kl":
        return
    counts, sizes = _counts(weights), candidate_bytes(weights)
    allowed = budget_bytes(weights, budget, counts)
    assert allowed is not None
    least, most = min(sizes), max(sizes)
    if least <= allowed <= most:
        return
    total, rest = sum(counts.values()), budget.amount - allowed
    if budget.key == "bits":
        span = math.ceil(800 * least / total) / 100, min(8.0, math.floor(800 * most / total) / 100)
        given, ends = f"bits {budget.amount}", [f"{end:.2f}" for end in span]
    else:
        given, ends = f"size {size(budget.amount)}", [size(end + rest) for end in (least, most)]
    end, which, instead = (ends[0], "less", "smallest") if allowed < least else (ends[1], "more", "largest")
    text = f"{given} is {which} than the {end} that all layers take with the {instead} candidate, with scales; give {ends[0]} to {ends[1]}"
    raise RequestError(weights.context.recipe.origin.at(budget.path, f"{text}, or other candidates or group sizes"))


def foresee(weights: WeightPlan, directory: Path) -> None:
    """See `compress.model.stage.LayersJob.foresee`; of pruned layers as many values are stored as the recipe asks for."""
    context = weights.context
    source, dtype = context.checkpoint, context.streamed.dtype
    entries: dict[str, Any] = {}
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    homes: dict[str, int] = {}
    for name, task in weights.tasks.items():
        rows, columns = get_matrix(context.streamed.model.get_submodule(name)).shape
        shape = (rows, columns)
        if task.candidates:  # any of them may come; those of one module alike, as engines fuse layers
            place = expert_of(context.streamed.model, name)
            number = homes.setdefault(name.rpartition(".")[0] if place is None else place[0], len(homes))
            task = replace(task, scheme=task.candidates[number % len(task.candidates)])
        density = 1.0 - task.share
        storage = formats.choose(task.scheme, shape, density=density)
        count = storage.expected_count(task.scheme, shape, density)
        specs, home = storage.tensors(task.scheme, shape, dtype, count), source.published_module(name)
        found |= {f"{home}.{key}": (spec.shape, spec.dtype) for key, spec in specs.items()}
        entries[name] = entry_to_dict(ModuleEntry(task.scheme, storage.name, count))
    untied = {tied: of for tied, of in context.streamed.ties.items() if weights.untie and not source.has(tied)}
    copied = {name: name for name in source.names()} | {tied: of for tied, of in untied.items() if source.has(of)}
    touched = {
        source.expert_tensors[f"{n}.weight"].home for n in weights.tasks if f"{n}.weight" in source.expert_tensors
    }
    for name, of in copied.items():
        if name.removesuffix(".weight") in weights.tasks:
            continue
        piece = source.expert_tensors.get(name)
        if piece is not None and piece.home not in touched:
            found[piece.source.name] = piece.source.shape, piece.source.dtype
        else:
            found[source.published(name)] = source.shape(of), source.dtype(of)
    directory.mkdir(parents=True)
    write_zeros(directory, source.path, config(weights, entries), found)


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
        named = not context.streamed.runs  # what is linear in code that nobody has read is not known
        found["quantization_config"] = build(entries, linear, foreign, also=linear, by_name=named)
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


# Layers that transformers with compressed-tensors alone would not find, not replace, or compute with another scheme. With one of them an
# artifact says `quant_method: compress`, and our own loader reads it (`runtime.layers.hf`). No family is named here: what counts is how
# transformers builds, initialises and converts the model at hand.


def foreign_layers(model: PreTrainedModel, entries: Mapping[str, ModuleEntry], pieces: Collection[str]) -> set[str]:
    """Names of those of `entries` that only our loader can load.

    Args:
        model: that is compressed, with its experts apart where they are stored so.
        entries: {compressed module: how it is stored}.
        pieces: tensors of single experts that the source stores fused: transformers cannot fuse those.
    """
    fused = {name.rpartition(".")[0] for name in pieces}
    if _other_modules(model) or _several_unpacked(entries) or not _experts_carried(model, entries, fused):
        return set(entries)
    kinds = {n for n, m in model.named_modules() if is_linear(m) and type(m) is not nn.Linear}
    if not needs_dense_loading(entries.values()):  # else transformers leaves every layer its weight
        kinds |= _initialised_by_name(model, entries)
    return (kinds | fused) & set(entries)


def _other_modules(model: nn.Module) -> bool:
    """Whether transformers builds a part of the model from other modules as soon as compressed-tensors is to load it (Llama 4's experts
    then are linear layers, which the published tensors do not fit)."""
    from transformers.quantizers import base

    patched: dict[str, Any] = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
    other = {kind for kind, patch in patched.items() if "compressed-tensors" in patch["quantization_methods"]}
    return any(type(module).__name__ in other for module in model.modules())


def _several_unpacked(entries: Mapping[str, ModuleEntry]) -> bool:
    """Packed zero points make transformers unpack while it loads (`runtime.formats.quantization_config`), and then it
    takes the first group's
    scheme for all layers; beside quantized activations it does not even do that."""
    stored = {_grid(entry) for entry in entries.values()}
    packed = (e.scheme.grid for e in entries.values() if e.format == "pack-quantized")
    return len(stored) > 1 and any(w is not None and not w.symmetric and w.strategy != "tensor" for w in packed)


def _experts_carried(model: nn.Module, entries: Mapping[str, ModuleEntry], fused: Collection[str]) -> bool:
    """Whether transformers puts the experts together as they are stored.

    It unpacks them as it does so, all with the scheme of the first group: it knows packed integers without zero points, and float8
    with a scale for a row or a tensor; what they read it does not round. Experts of 8-bit integers it refuses, but other engines run
    them, and read no other `quant_method`: so those count as carried. Dense experts go through beside float8 alone. Those that the
    source has fused (`fused`) are stored so where they stay dense.
    """
    experts = {
        f"{name}.{number}.{projection}"
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for number in range(module.count)
        for projection in module.layout.projections
    }
    experts -= fused - entries.keys()
    if not experts or not entries:
        return True
    first = next(iter(entries.values()))
    dense = experts - entries.keys()
    if dense and first.format != "float-quantized":
        return False
    weights = first.scheme.grid
    known = weights is not None and weights.symmetric
    if first.format in ("float-quantized", "int-quantized"):
        known = known and weights is not None and weights.strategy in ("tensor", "channel")
    else:
        known = known and first.format == "pack-quantized" and first.scheme.activations is None
    return all(known and _grid(entries[name]) == _grid(first) for name in experts - dense)


def _grid(entry: ModuleEntry) -> tuple[object, str]:
    """What tells groups of a configuration of compressed-tensors apart, which has no word for sparsity."""
    return replace(entry.scheme, sparsity=None), entry.format


def _initialised_by_name(model: PreTrainedModel, entries: Mapping[str, ModuleEntry]) -> set[str]:
    """Layers whose weight the model looks for when it initialises a module around them (GPT-BigCode, T5).

    compressed-tensors leaves a packed layer without a `weight`, and transformers initialises every module after loading. Each kind of
    module is asked once, with copies on meta: without the weights, and where that fails with them.
    """
    inside: dict[str, set[str]] = {}
    for name, entry in entries.items():
        shape = sides(model.get_submodule(name))
        if shape is None or expert_of(model, name) is not None:
            continue
        if "weight" in formats.get(entry.format).tensors(entry.scheme, shape, torch.float32, entry.count):
            continue
        parts = name.split(".")
        for end in range(len(parts)):
            inside.setdefault(".".join(parts[:end]), set()).add(".".join(parts[end:]))
    found: set[str] = set()
    asked: dict[tuple[type[nn.Module], frozenset[str]], bool] = {}
    for home, layers in inside.items():
        kind = (type(model.get_submodule(home)), frozenset(layers))
        if kind not in asked:
            asked[kind] = not _initialises(model, home, layers) and _initialises(model, home, ())
        if asked[kind]:
            found |= {f"{home}.{layer}" if home else layer for layer in layers}
    return found


def _initialises(model: PreTrainedModel, home: str, without: Collection[str]) -> bool:
    """Whether a copy of module `home` can be initialised whose layers `without` have no weight.

    The copy is over tensors without values, so that nothing of the model is touched. Experts, which transformers has in one, are left out.
    """
    module = model.get_submodule(home)
    instead: dict[int, Any] = {id(m): nn.Module() for m in module.modules() if isinstance(m, Experts)}
    for value in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(value, device="meta")
        instead[id(value)] = nn.Parameter(empty, False) if isinstance(value, nn.Parameter) else empty
    try:
        probe = copy.deepcopy(module, instead)
        for name in without:
            del probe.get_submodule(name).weight
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            initialiser(model, home)._init_weights(probe)
    except Exception:  # models compute what they like there
        return False
    return True
