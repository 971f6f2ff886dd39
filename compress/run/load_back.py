"""Load-back gate: the artifact is opened as a user would open it, and compared with what the pipeline computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.core.tensors import relative
from compress.model.context import Context
from compress.model.footprint import WHOLE_BYTES
from compress.model.hidden_states import HiddenStates, read_batch
from compress.model.source import SourceCheckpoint
from compress.model.streamed import StreamedModel
from runtime import formats
from runtime.api.model import Model
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.engines.blueprint import Blueprint
from runtime.engines.choose import choose_engine
from runtime.engines.torch.encoder import TorchEncoderEngine
from runtime.engines.torch.engine import TorchEngine
from runtime.engines.torch.seq2seq import TorchSeq2SeqEngine
from runtime.errors import CompressError
from runtime.formats.quantization_config import parse
from runtime.layers.compressed_linear import CompressedLinear
from runtime.layers.install import install_compressed
from runtime.modeling.weights import main_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The streamed artifact repeats the pipeline's own arithmetic on weights whose digests are equal: usually the difference is 0. A
# library may sum in another order, and a bf16 model (8 bits of mantissa) makes of that what wrong wiring exceeds by far.
STREAM_TOLERANCE = 3e-2
# A production kernel against the reference, one layer on the same input: other orders of summation, bf16 results (8 bits of
# mantissa), int8 codes that fall on the other side of a half.
KERNEL_TOLERANCE = 2e-2
# The whole model: small differences of layers may add up, wrong wiring (positions, masks, names) is far beyond this.
MODEL_TOLERANCE = 0.5


def open_artifact(path: Path, context: Context) -> StreamedModel:
    """The artifact in `path`, streamed; weight-only layers run dequantized, which is what the reference kernel computes."""
    checkpoint, streamed = Checkpoint(path), context.streamed

    def put(model: PreTrainedModel) -> None:
        install_compressed(model, checkpoint.config, checkpoint.names())

    artifact = StreamedModel(checkpoint, streamed.device, install=put, loaded=dense_for_now, dtype=streamed.dtype)
    artifact.rows, artifact.prefix = streamed.rows, streamed.prefix
    return artifact


@contextmanager
def dense_for_now(part: nn.Module, skip: Callable[[str], bool] | None = None) -> Iterator[None]:
    """Replace the loaded weight-only compressed layers of `part` by dense ones, so that each is unpacked once and not per batch.

    `skip` says which names to leave alone (the blocks', when `part` is the whole model).
    """
    replaced: dict[str, nn.Module] = {}
    for name, module in list(part.named_modules()):
        if not isinstance(module, CompressedLinear) or (skip is not None and skip(name)):
            continue
        if module.entry.scheme.activations is not None:
            module.prepare(kernels="reference")
            continue
        weight = module.dequantize()
        rows, columns = weight.shape
        dense = nn.Linear(columns, rows, bias=module.bias is not None, device="meta", dtype=weight.dtype)
        dense.weight = nn.Parameter(weight, requires_grad=False)
        if module.bias is not None:
            dense.bias = nn.Parameter(module.bias.data, requires_grad=False)
        part.set_submodule(name, dense)
        replaced[name] = module
    try:
        yield
    finally:
        # By name: BigBird swaps the module around a layer when it first reads short rows.
        for name, module in replaced.items():
            part.set_submodule(name, module)


def check_stored(path: Path, source: SourceCheckpoint) -> None:
    """Whether config.json of an artifact describes what its files hold: every compressed layer as its format stores it, and all else.

    That is what can be known of a model that nothing runs; the bytes of its parts were read back as they were written.

    Raises:
        CompressError: it does not.
    """
    artifact = Checkpoint(path)
    modules = [name.removesuffix(".weight") for name in source.names() if name.endswith(".weight")]
    left = set(artifact.names())
    for name, entry in parse(artifact.config.get("quantization_config") or {}, modules).items():
        rows, columns = source.shape(f"{name}.weight")
        storage = formats.get(entry.format)
        specs = storage.tensors(entry.scheme, (rows, columns), main_dtype(artifact), entry.count)
        for key, spec in specs.items():
            own = f"{name}.{key}"
            if own not in left or artifact.shape(own) != spec.shape or artifact.dtype(own) != spec.dtype:
                raise CompressError(f"{path}: the files do not hold {own} as config.json describes it; this is a bug")
        left -= {f"{name}.{key}" for key in specs}
        modules.remove(name)
    expected = {
        name for name in source.names() if name.removesuffix(".weight") in modules or not name.endswith(".weight")
    }
    if wrong := sorted(left ^ (expected - source.dropped.keys())):
        raise CompressError(f"{path}: config.json and the files do not agree on {wrong[0]}; this is a bug")


@torch.inference_mode()
def check_against_pipeline(
    context: Context, calibrated: bool, artifact: StreamedModel, directory: RunDirectory, reporter: Reporter
) -> None:
    """Follow the probe through the artifact on disk, and through `runtime.load`, and compare with the pipeline's own hidden states.

    Args:
        calibrated: weights were compressed by what calibration text does to them, so its hidden states went through the blocks too.

    Raises:
        CompressError: they differ by more than rounding; the directory keeps its state for a look or a resume.
    """
    count = len(context.streamed.blocks)
    batches = len(context.batches) + 1 if calibrated else 1
    ours = read_batch(directory.hidden_path(count), batches - 1)
    states = HiddenStates(1)
    artifact.prelude([(context.probe, None)], states)
    hidden = states.get(0)
    for index in range(count):
        with artifact.loaded_block(index):
            hidden = artifact.advance(index, hidden, (context.probe, None))
    difference = relative(hidden, ours)
    reporter.detail(f"load back: streamed artifact differs from the pipeline by {difference:.2e}")
    if not difference <= STREAM_TOLERANCE:
        raise CompressError(
            f"{directory.path}: the artifact read back differs from the pipeline (relative {difference:.2e})"
        )
    if sum(file.stat().st_size for file in artifact.checkpoint.files()) > WHOLE_BYTES:
        # Memory stays flat in depth: larger artifacts are not loaded whole. What was written is already known to be right.
        reporter.detail("load back: checked block by block")
        return
    _check_runtime(context, directory.path, artifact.outputs(hidden, context.probe).float(), reporter)


def _check_runtime(context: Context, path: Path, expected: torch.Tensor, reporter: Reporter) -> None:
    """The model as `runtime.load` builds it: each layer's kernel against the reference on what the layer really sees, and what
    the engine that users get gives them: logits, or an encoder's hidden states.
    """
    device = context.streamed.device
    # The manifest is not there yet, so this is what `runtime.load` does after it has looked for one.
    blueprint = Blueprint(Artifact(path), device, "auto", None, False)
    fast, plain = blueprint.build_module(), Blueprint(Artifact(path), device, "reference", None, False).build_module()
    worst = 0.0
    layers = {name: module for name, module in fast.named_modules() if isinstance(module, CompressedLinear)}
    hooks = {name: _Compare(plain.get_submodule(name)) for name in layers}
    for name, layer in layers.items():
        layer.register_forward_hook(hooks[name])
    # Fused engines compute past the modules, so the layers are asked through the modules themselves, the engine after them.
    context.streamed.call(fast, (context.probe, None))
    for name, hook in hooks.items():
        if hook.difference is None:  # an expert that the probe was not sent to
            hook.ask(layers[name])
        assert hook.difference is not None
        worst = max(worst, hook.difference)
        if not hook.difference <= KERNEL_TOLERANCE:
            raise CompressError(f"{path}: kernel and reference of {name} differ (relative {hook.difference:.2e})")
    logits = _ask_engine(context, path, fast, blueprint).to(expected.device)
    difference = relative(logits, expected)
    reporter.detail(f"load back: runtime.load() differs by {worst:.2e} in a layer, {difference:.2e} in what it gives")
    if not difference <= MODEL_TOLERANCE:
        raise CompressError(f"{path}: runtime.load() computes otherwise than the pipeline (relative {difference:.2e})")


def _ask_engine(context: Context, path: Path, module: PreTrainedModel, blueprint: Blueprint) -> torch.Tensor:
    """The probe through the engine that `runtime.load` chooses."""
    streamed, device = context.streamed, blueprint.device
    source = streamed.rows.source(context.probe).to(device)
    if blueprint.kind == "encoder":
        return TorchEncoderEngine(module, device).forward(source, None)
    if blueprint.kind == "encoder-decoder":
        engine = TorchSeq2SeqEngine(module, device)
        return engine.decode(streamed.rows.target(context.probe).to(device), engine.encode(source, None), None, None)
    chosen = choose_engine(TorchEngine(module, device), blueprint)
    return Model(chosen, None, Artifact(path), frozenset()).logits(context.probe)


class _Compare:
    """Forward hook: runs the same input through the reference layer and remembers how far the outputs are apart."""

    def __init__(self, reference: nn.Module) -> None:
        self.reference = reference
        self.difference: float | None = None  # the layer has not been called

    def ask(self, layer: CompressedLinear) -> None:
        """Compare on random input."""
        generator = torch.Generator().manual_seed(0)
        layer(torch.randn(8, layer.in_features, generator=generator).to(layer.device, layer.dtype))

    def __call__(self, _module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.difference = max(self.difference or 0.0, relative(output, self.reference(args[0])))
