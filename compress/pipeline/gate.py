"""The load-back gate: what was written is opened as a user would open it, and held against what the pipeline computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from runtime.linear import CompressedLinear, install
from runtime.quantization_config import parse
from safetensors import safe_open
from torch import nn

import runtime
from compress.pipeline.directory import RunDirectory
from compress.pipeline.hidden import HiddenStates, batch_file
from compress.pipeline.progress import Reporter
from compress.pipeline.session import Session
from compress.pipeline.stream import StreamedModel
from runtime.checkpoint import Checkpoint
from runtime.errors import CompressError
from runtime.skeleton import linear_shapes

# The streamed artifact repeats the pipeline's own arithmetic; only the order of sums inside a library may differ.
STREAM_TOLERANCE = 2e-3
# Production kernels accumulate in other orders and types (bf16 activations: 8 bits of mantissa).
KERNEL_TOLERANCE = 5e-2


def open_artifact(path: Path, session: Session) -> StreamedModel:
    """The artifact in `path`, streamed; weight-only layers run dequantized, which is what the reference kernel computes."""
    checkpoint = Checkpoint(path)

    def put(model: nn.Module) -> None:
        config = checkpoint.config.get("quantization_config")
        if config is not None:
            install(model, parse(config, list(linear_shapes(model))))

    return StreamedModel(
        checkpoint, session.streamed.device, install=put, loaded=dense_for_now, dtype=session.streamed.dtype
    )


@contextmanager
def dense_for_now(part: nn.Module, skip: str | None = None) -> Iterator[None]:
    """Replace the loaded weight-only compressed layers of `part` by dense ones, so that each is unpacked once and not per batch.

    `skip` is a name prefix to leave alone (the blocks, when `part` is the whole model).
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for name, module in list(part.named_modules()):
        if not isinstance(module, CompressedLinear) or (skip is not None and name.startswith(skip)):
            continue
        if module.entry.scheme.activations is not None:
            module.prepare(kernels="reference")
            continue
        weight = module.dequantize()
        dense = nn.Linear(
            weight.shape[1], weight.shape[0], bias=module.bias is not None, device="meta", dtype=weight.dtype
        )
        dense.weight = nn.Parameter(weight, requires_grad=False)
        if module.bias is not None:
            dense.bias = nn.Parameter(module.bias.data, requires_grad=False)
        parent_name, _, leaf = name.rpartition(".")
        parent = part.get_submodule(parent_name)
        setattr(parent, leaf, dense)
        replaced.append((parent, leaf, module))
    try:
        yield
    finally:
        for parent, leaf, module in replaced:
            setattr(parent, leaf, module)


@torch.inference_mode()
def check_against_pipeline(
    session: Session, artifact: StreamedModel, directory: RunDirectory, reporter: Reporter
) -> None:
    """Follow the probe through the artifact on disk, and through `runtime.load`, and compare with the pipeline's own hidden states.

    Raises:
        CompressError: they differ by more than rounding; the directory keeps its state for a look or a resume.
    """
    count = len(session.streamed.blocks)
    batches = len(session.batches) + 1 if session.needs_data else 1
    ours = _probe(directory.hidden_path(count), batches)
    artifact.load_outside()
    states = HiddenStates(1)
    artifact.prelude([(session.probe, None)], states)
    hidden = states.get(0)
    for index in range(count):
        with artifact.loaded_block(index):
            hidden = artifact.run_block(index, hidden, (session.probe, None))
    difference = _relative(hidden, ours)
    reporter.detail(f"load back: streamed artifact differs from the pipeline by {difference:.2e}")
    if not difference <= STREAM_TOLERANCE:
        raise CompressError(
            f"{directory.path}: the artifact read back computes something else than the pipeline did (relative {difference:.2e})"
        )
    packed = sum(file.stat().st_size for file in artifact.checkpoint.files())
    if 2 * packed > psutil.virtual_memory().available:
        reporter.detail("load back: the artifact is too large for the memory here, so it was checked streamed only")
        return
    reference = artifact.logits(hidden).float()
    loaded = runtime.load(directory.path, device=str(session.streamed.device))
    logits = loaded.logits(session.probe).to(reference.device)
    difference = _relative(logits, reference)
    reporter.detail(f"load back: runtime.load() differs from the reference by {difference:.2e}")
    if not difference <= KERNEL_TOLERANCE:
        raise CompressError(
            f"{directory.path}: runtime.load() computes something else than the pipeline did (relative {difference:.2e})"
        )


def _probe(path: Path, batches: int) -> torch.Tensor:
    with safe_open(path / batch_file(batches - 1), framework="pt") as file:
        return file.get_tensor("hidden")


def _relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    value, reference = value.float().cpu(), reference.float().cpu()
    return float((value - reference).norm() / reference.norm().clamp_min(1e-12))
