"""Reference of an export that changes weights: the artifact's own model with the same change made.

A change (weights rounded anew, activations that are no longer rounded) moves tokens by more than any error of the export would, so
that a comparison with the artifact would prove nothing. The change is therefore made in the artifact's own model too, export and
model must agree as closely as ever, and how far the change moves the model from the artifact is a figure beside that.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from export.onnx_graph.grid import Rules, to_grid
from export.target import Job
from export.verify import Probe, compare_logits, load_artifact, probe, probe_model
from runtime import formats
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import GridScheme, Scheme
from runtime.modeling.skeleton import model_kind

if TYPE_CHECKING:
    from runtime.layers.compressed_linear import CompressedLinear


@dataclass(frozen=True)
class Expected:
    """What an export of a decoder must say.

    Attributes:
        probe: of the artifact, or of the artifact with the change made.
        change: `kl_of_change` (nats a token) and `top1_agreement_of_change` between the artifact and the artifact with the change
            made; empty where nothing is changed.
    """

    probe: Probe
    change: dict[str, float] = field(default_factory=dict)


def expect(job: Job, rules: Rules, float_inputs: Collection[str] = ()) -> Expected:
    """Run a decoder on the CPU in float32, with the change and without it. One model is in memory at a time.

    Args:
        job: its `losses` name the layers whose weights were rounded anew.
        rules: that they were rounded by.
        float_inputs: layers whose inputs are no longer rounded.
    """
    if not job.losses and not float_inputs:
        return Expected(probe(job))
    found = probe_model(load_changed(job, rules, float_inputs))
    gc.collect()
    original = replace(found, logits=load_artifact(job.source).logits(found.rows))
    loss = compare_logits(original, lambda _: found.logits, float("inf"))
    return Expected(found, {f"{name}_of_change": loss[name] for name in ("kl", "top1_agreement")})


def load_changed(job: Job, rules: Rules, float_inputs: Collection[str] = ()) -> Any:
    """The artifact's model in float32 on the CPU, of its kind, with the change made; see `expect`."""
    from runtime.api.model import Model
    from runtime.engines.blueprint import Blueprint
    from runtime.engines.torch.engine import TorchEngine

    source = job.source
    if model_kind(source.config) == "decoder":
        # Loaded the usual way its layers may be fused, and none could be replaced.
        cpu = torch.device("cpu")
        module: Any = Blueprint(source.artifact, cpu, "auto", torch.float32, source.trust_remote_code).build_module()
        model: Any = Model(TorchEngine(module, cpu), None, source.artifact, frozenset())
    else:
        model = load_artifact(source)
        module = model.engine.module
    for name in source.entries:
        if name in job.losses or name in float_inputs:
            parent, _, leaf = name.rpartition(".")
            owner, layer = module.get_submodule(parent), _layer(job, name, rules, name in float_inputs)
            layer.bias = getattr(owner, leaf).bias
            setattr(owner, leaf, layer)
    return model


def _layer(job: Job, name: str, rules: Rules, float_inputs: bool) -> CompressedLinear:
    """One layer in float32, rounded anew if the writer did so, without the grid of its inputs if the writer had no word for it."""
    from runtime.layers.compressed_linear import CompressedLinear

    source, scheme = job.source, job.source.entries[name].scheme
    acts = None if float_inputs else scheme.activations
    weight = source.weight(name)
    if name in job.losses:
        # the grid `[K, N]` that the writer rounds to, as the runtime holds one `[N, K]`
        grid = to_grid(weight, rules, True, name)
        strategy: Any = "group" if grid.block is not None else "channel" if grid.scale.dim() else "tensor"
        scale = grid.scale.t().contiguous() if grid.block is not None else grid.scale.unsqueeze(-1)
        anew = Scheme(GridScheme(grid.bits, "int", True, strategy, grid.block), acts, transform=scheme.transform)
        values = grid.codes.t().contiguous()
        weight = replace(weight, values=values, scale=scale, zero_point=None, mask=None, scheme=anew)
    else:
        weight = replace(weight, scheme=replace(scheme, activations=acts))
    storage = formats.choose(weight.scheme, source.shapes[name])
    tensors = storage.pack(weight, **source.input_basis(name))
    entry = ModuleEntry(weight.scheme, storage.name, storage.stored_count(tensors))
    if acts is not None:
        inputs = {"input_scale": source.input_scale(name), "input_zero_point": source.input_zero_point(name)}
        tensors |= {part: stored for part, stored in inputs.items() if stored is not None}
    layer = CompressedLinear.from_tensors(entry, source.shapes[name], tensors, None, source.dtype)
    layer.to(torch.float32)
    layer.prepare()
    return layer
