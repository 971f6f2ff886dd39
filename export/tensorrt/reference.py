"""What an engine is compared with: the artifact itself, or, where TensorRT cannot hold it, the artifact with the same change made.

A change (weights rounded anew, activations that are no longer rounded) moves tokens by more than any error of the export would, so
that a comparison with the artifact would prove nothing. The change is therefore made in the artifact's own model too, engine and
model must agree as closely as ever, and how far the change moves the model from the artifact is a figure beside that.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from export.onnx.grid import TENSORRT, Grid, to_grid
from export.source import Source
from export.target import Job
from export.tensorrt.fits import dropped_activations
from export.verify import Probe, compare_logits, probe, probe_model
from runtime import formats
from runtime.quantization_config import ModuleEntry
from runtime.scheme import ActivationScheme, CompressedWeight, Scheme, WeightScheme

if TYPE_CHECKING:
    from runtime.linear import CompressedLinear
    from runtime.model import Model


@dataclass(frozen=True)
class Expected:
    """What an engine must say.

    Attributes:
        probe: of the artifact, or of the artifact with the change made.
        change: `kl_of_change` (nats a token) and `top1_agreement_of_change` between the artifact and the artifact with the change
            made; empty where nothing is changed.
    """

    probe: Probe
    change: dict[str, float] = field(default_factory=dict)


def changed_modules(job: Job) -> list[str]:
    """Layers that do not compute what they do in the artifact; `job.losses` is filled by the writer."""
    names = {*job.losses, *dropped_activations(job.source)}
    return [name for name in job.source.entries if name in names]


def expect(job: Job) -> Expected:
    """Run the artifact, and where it is changed the changed one, on the CPU in float32. One model is in memory at a time."""
    names = changed_modules(job)
    if not names:
        return Expected(probe(job))
    model = load_changed(job, names)
    found = probe_model(model)
    del model
    gc.collect()
    original = replace(found, logits=_logits(job.source, found.rows))
    loss = compare_logits(original, lambda _: found.logits, float("inf"))
    return Expected(found, {f"{name}_of_change": loss[name] for name in ("kl", "top1_agreement")})


def load_changed(job: Job, names: list[str]) -> Model:
    """The artifact's model in float32, with the layers `names` as TensorRT gets them."""
    from runtime.engines.torch import Blueprint, TorchEngine
    from runtime.model import Model

    source, cpu = job.source, torch.device("cpu")
    module = Blueprint(source.artifact, cpu, "auto", torch.float32, source.trust_remote_code).build_module()
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        layer = _layer(source, name, name in job.losses)
        layer.bias = getattr(owner, leaf).bias
        setattr(owner, leaf, layer)
    return Model(TorchEngine(module, cpu), None, source.artifact, frozenset())


def _layer(source: Source, name: str, anew: bool) -> CompressedLinear:
    """One layer in float32, rounded anew if the writer did so, without the activation grid that TensorRT has no word for."""
    from runtime.linear import CompressedLinear

    scheme = source.entries[name].scheme
    acts = None if scheme.activations is None or scheme.activations.dynamic else scheme.activations
    weight = source.weight(name)
    if anew:
        weight = _regridded(weight, to_grid(weight, TENSORRT, True, name), acts)
    else:
        weight = replace(weight, scheme=replace(scheme, activations=acts))
    storage = formats.choose(weight.scheme, source.shapes[name])
    tensors = storage.pack(weight)
    entry = ModuleEntry(weight.scheme, storage.name, formats.value_count(storage, tensors))
    scale, zero = source.input_scale(name), source.input_zero_point(name)
    if acts is not None:
        tensors |= {"input_scale": scale} if scale is not None else {}
        tensors |= {"input_zero_point": zero} if zero is not None else {}
    layer = CompressedLinear.from_tensors(entry, source.shapes[name], tensors, None, source.dtype)
    layer.to(torch.float32)
    layer.prepare()
    return layer


def _regridded(weight: CompressedWeight, grid: Grid, acts: ActivationScheme | None) -> CompressedWeight:
    """A weight on the grid `[K, N]` that the writer rounds to, as the runtime holds one `[N, K]`."""
    rows = grid.codes.shape[1]
    strategy: Any = "group" if grid.block is not None else "channel" if grid.scale.dim() else "tensor"
    scale = grid.scale.t() if grid.block is not None else grid.scale.reshape(rows if grid.scale.dim() else 1, -1)
    scheme = Scheme(WeightScheme(grid.bits, "int", True, strategy, grid.block), acts)
    return replace(
        weight,
        values=grid.codes.t().contiguous(),
        scale=(scale if strategy != "tensor" else scale.reshape(1)).contiguous(),
        zero_point=None,
        mask=None,
        scheme=scheme,
    )


def _logits(source: Source, rows: torch.Tensor) -> torch.Tensor:
    """The artifact's own, float32."""
    import runtime

    trust = source.trust_remote_code
    model = runtime.load(source.path, device="cpu", dtype="float32", verify=False, trust_remote_code=trust)
    logits: torch.Tensor = model.logits(rows)
    return logits
