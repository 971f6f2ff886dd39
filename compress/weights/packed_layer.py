"""Packed layer: a solved weight in its storage format, and its simulation in the block."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from compress.core.method import Problem
from compress.core.processes import Team
from compress.core.statistics import Statistics
from compress.core.tensors import finite
from compress.quantize.input_grid import calibrated_tensors
from compress.quantize.transforms import METHODS as TRANSFORMS
from compress.quantize.transforms import Basis, Layers
from compress.quantize.weight_constraint import WeightConstraint
from compress.weights.layer_task import LayerTask, share_global_scale
from compress.weights.solver.compensate import LayerResult
from compress.weights.solver.group import solve_group
from runtime import formats
from runtime.errors import CompressError
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.representation import Tensors
from runtime.formats.scheme import Scheme
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.linear_modules import get_matrix, set_matrix

#: Rows whose bytes are copied at a time for a digest.
DIGESTED = 512


@dataclass
class SolvedLayer:
    """A layer ready to be written.

    Attributes:
        tensors: what is stored, keys relative to the module ("weight_packed", ...), without the bias.
        entry: how `config.json` describes it.
        dense: the dequantized weight, in the basis of its input transform.
        digest: SHA-256 of its bytes; the load-back gate compares it with what the disk gives.
        record: the layer's line in the manifest; its error is None where the weight was settled before and is only stored.
    """

    tensors: dict[str, torch.Tensor]
    entry: ModuleEntry
    shape: tuple[int, int]
    dense: torch.Tensor
    digest: str
    record: dict[str, Any] = field(default_factory=dict)

    def without_dense(self) -> SolvedLayer:
        """On the CPU, without the dense weight, which its tensors unpack to, and with float8 as bytes, which torch does not pickle."""
        moved = {key: value.cpu() for key, value in self.tensors.items()}
        tensors = {key: value.view(torch.uint8) if value.dtype.itemsize == 1 else value for key, value in moved.items()}
        return replace(self, tensors=tensors, dense=torch.empty(0, dtype=self.dense.dtype))

    def with_dense(self) -> SolvedLayer:
        """The layer that was sent without its dense weight."""
        specs = formats.get(self.entry.format).tensors(
            self.entry.scheme, self.shape, self.dense.dtype, self.entry.count
        )
        bytes_of = {key for key, spec in specs.items() if spec.dtype.itemsize == 1}
        tensors = {k: value.view(specs[k].dtype) if k in bytes_of else value for k, value in self.tensors.items()}
        sent = replace(self, tensors=tensors)
        return replace(sent, dense=sent.unpacked(tensors))

    def unpacked(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The dense weight that stored tensors unpack to, contiguous."""
        storage = formats.get(self.entry.format)
        weight = storage.unpack(tensors, self.entry.scheme, self.shape, self.dense.dtype)
        return weight.dequantize().contiguous()


def share_inputs(
    tasks: Mapping[str, LayerTask], weights: Mapping[str, torch.Tensor], statistics: Statistics | None, team: Team
) -> tuple[dict[str, LayerTask], dict[str, Basis]]:
    """Layers that read one input: their tasks with one global scale, where their scheme has one, and the basis that each is rounded in, one
    for all of one input transform, where they have any. The main process of a team finds it.

    Args:
        weights: `[out_i, in]` of each. statistics: of the input; None where no method needs any.
    """
    shared, bases = dict[str, LayerTask](), dict[str, Basis]()
    for transform in dict.fromkeys(task.scheme.transform for task in tasks.values()):
        alike = {name: task for name, task in tasks.items() if task.scheme.transform == transform}
        own = [weights[name] for name in alike]
        if transform is not None:
            scheme, samples = next(iter(alike.values())).scheme, None if statistics is None else statistics.samples
            found: Tensors = {}
            if team.is_main:
                found = TRANSFORMS[transform.name].find(Layers(own, scheme, samples))
            specs = transform.tensors(own[0].shape[1])
            stored = {name: tensor.to("cpu", specs[name].dtype) for name, tensor in found.items()}
            basis = Basis(transform, team.broadcast(stored))
            bases |= dict.fromkeys(alike, basis)
            if any(task.scheme.has_global_scale for task in alike.values()):
                own = [basis.weight(weight) for weight in own]
        shared |= share_global_scale(alike, own)
    return shared, bases


def weight_digest(dense: torch.Tensor) -> str:
    """SHA-256 over the bytes of a dense weight (any dtype); both zeros count as one."""
    digest = hashlib.sha256()
    for rows in dense.detach().split(DIGESTED):
        digest.update((rows + 0.0).cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def solve_layers(
    tasks: Mapping[str, LayerTask],
    modules: Sequence[nn.Module],
    weights: Sequence[torch.Tensor],
    statistics: Statistics | None,
    dtype: torch.dtype,
    constraints: Mapping[str, WeightConstraint],
    output_hessians: list[torch.Tensor] | None = None,
    basis: Basis | None = None,
) -> list[SolvedLayer]:
    """Solve and pack layers that share an input.

    Args:
        tasks: by qualified name, of the same settings.
        modules: of each, in their order. weights: `[out_i, in]` of each.
        statistics: of the input; None where no method needs any.
        dtype: of the model.
        constraints: masks and grids of layers, by name.
        output_hessians: of each, where the loss of the model counts.
        basis: that they are rounded in; None: the one their input comes in.
    """
    names, task = list(tasks), next(iter(tasks.values()))
    sparsity = None if task.prune is None else [own.share for own in tasks.values()]
    settled = None
    if task.pruned or task.quantized:
        found = [constraints[name] for name in names if name in constraints]
        settled = [one.restricted(mask=task.pruned, grid=task.quantized) for one in found]
    problem = Problem(
        list(weights), statistics, task.prune, task.quantize, task.scheme, dtype, names, sparsity, settled,
        output_hessians=output_hessians, basis=basis,
    )  # fmt: skip
    solved, form = solve_group(problem), task.scheme.weights
    if form is not None and form.lossless:
        for name, weight, layer in zip(names, weights, solved, strict=True):
            if not torch.equal(
                layer.weight.dequantize().view(torch.uint8), weight.to(dtype).contiguous().view(torch.uint8)
            ):
                raise CompressError(f"{name}: {form.describe()} does not give the weight back exactly")
    inputs = _input_tensors(task.scheme, statistics, basis, dtype)
    return [
        _pack(name, own, layer, {key: tensor.clone() for key, tensor in inputs.items()}, module)
        for (name, own), layer, module in zip(tasks.items(), solved, modules, strict=True)
    ]


def _pack(name: str, task: LayerTask, solved: LayerResult, inputs: Tensors, module: nn.Module) -> SolvedLayer:
    """Pack through the layer's format; that the stored tensors unpack to the same weight is proven once the shard is written."""
    weight = solved.weight
    shape = rows, columns = weight.shape
    kept = float(weight.mask.float().mean()) if weight.mask is not None else 1.0
    storage = formats.choose(weight.scheme, shape, density=kept)
    tensors = storage.pack(weight, **inputs)
    # Solvers work on transposed weights; in the usual layout the same products are summed in the same order as in the artifact.
    dense = weight.dequantize().contiguous()
    if not finite(dense):
        raise CompressError(f"{name}: the compressed weight holds NaN or Inf")
    count = storage.stored_count(tensors)
    before = rows * columns * module.weight.element_size()  # type: ignore[union-attr, operator]
    after = sum(t.numel() * t.element_size() for t in tensors.values())
    stored_bits = 8.0 * after / (rows * columns)
    record = {
        "name": name, "method": task.describe(), "format": storage.name, "error": float(solved.error) if task.methods else None,
        "bits": round(stored_bits, 4), "sparsity": round(1.0 - kept, 6), "shape": list(shape),
        "bytes_before": before, "bytes_after": after, "notes": solved.notes,
    }  # fmt: skip
    return SolvedLayer(
        tensors, ModuleEntry(weight.scheme, storage.name, count), shape, dense, weight_digest(dense), record
    )


def _input_tensors(scheme: Scheme, statistics: Statistics | None, basis: Basis | None, dtype: torch.dtype) -> Tensors:
    """What is stored of a layer's inputs: a calibrated grid, and the basis that they are rounded in."""
    found = {} if basis is None else dict(basis.tensors)
    if scheme.activations is None or not scheme.activations.calibrated:
        return found
    assert statistics is not None
    low, high = statistics.minimum, statistics.maximum
    if basis is not None:
        assert statistics.samples is not None
        seen = basis.inputs(statistics.samples) if len(statistics.samples) else torch.zeros_like(low)
        low, high = seen, seen
    return found | calibrated_tensors(scheme.activations, low.min(), high.max(), dtype)


def simulate(block: nn.Module, name: str, solved: SolvedLayer) -> None:
    """Make the layer compute what the artifact will compute, so that later layers are calibrated on the truth.

    Weight-only: the Linear holds the dequantized weight, bit for bit that of the reference kernel. With
    transformed inputs or quantized activations the artifact's own module takes its place.
    """
    module = block.get_submodule(name)
    device = get_matrix(module).device
    scheme = solved.entry.scheme
    if scheme.activations is None and scheme.transform is None:
        set_matrix(module, solved.dense.to(device))
        return
    tensors, bias = {k: v.to(device) for k, v in solved.tensors.items()}, module.bias
    replacement = CompressedLinear.from_tensors(solved.entry, solved.shape, tensors, bias, solved.dense.dtype)  # type: ignore[arg-type]
    replacement.prepare(kernels="reference")
    parent_name, _, leaf = name.rpartition(".")
    setattr(block.get_submodule(parent_name), leaf, replacement)
