"""`--target onnx`: a decoder with its cache as one graph, weights compressed, for ONNX Runtime and whatever else reads ONNX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from export.folder import copy_tokenizer, write_json
from export.onnx.dialect import Dialect, dialect
from export.onnx.grid import ONNX, TENSORRT, conversion, why_not
from export.source import Source
from export.target import Conversion, Job, Options, Target, Verification
from export.verify import TIE, compare_logits, compare_tokens, probe
from runtime.scheme import Scheme
from runtime.skeleton import model_kind

_DTYPES = {"float32": torch.float32, "float16": torch.float16}
# Mean KL that is allowed. float32: only the order of sums differs; float16: every activation is rounded to 11 bits. Where
# activations are quantized, a sum in another order may put one of them on the neighbouring code.
KL_LIMITS = {("float32", False): 1e-5, ("float32", True): 5e-3, ("float16", False): 1e-2, ("float16", True): 2e-2}
TIES = {("float32", False): TIE, ("float32", True): 0.5, ("float16", False): 0.5, ("float16", True): 1.0}


class OnnxOptions(Options):
    """Options of `--target onnx`."""

    ort: bool = False
    """ONNX Runtime's own operators (MatMulNBits, GroupQueryAttention, ...) instead of standard ones."""
    dtype: Literal["float32", "float16"] = "float32"
    """Activations and logits. CPUs compute float32; float16 is for GPUs."""


class OnnxTarget(Target):
    """ONNX, opset 21: int4/int8 DequantizeLinear `[K, N]` in blocks, which ONNX Runtime fuses into its products."""

    name: ClassVar[str] = "onnx"
    summary: ClassVar[str] = (
        "ONNX with its KV cache, weights compressed in the graph; runs in ONNX Runtime and in runtime.load()."
    )
    extra: ClassVar[str | None] = "onnx"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript", "onnx_ir", "onnxruntime")
    options: ClassVar[type[Options]] = OnnxOptions

    def why_not(self, source: Source, options: Any) -> str | None:
        kind = model_kind(source.config)
        if kind != "decoder":
            return f"{type(source.skeleton).__name__} is an {kind}; only decoders are written"
        for name, entry in source.entries.items():
            reason = _why_not(entry.scheme, source.shapes[name], options.requantize)
            if reason is not None:
                return f"{name} has {reason}"
        return None

    def conversions(self, source: Source, options: Any) -> list[Conversion]:
        return conversions(source, dialect("ort" if options.ort else "onnx", _DTYPES[options.dtype]))

    def bytes_needed(self, source: Source, options: Any) -> int:
        return int(2.5 * sum(rows * columns for rows, columns in source.shapes.values())) + source.bytes + (16 << 20)

    def write(self, job: Job) -> None:
        from export.onnx.write import FILE, write_decoder

        spoken = dialect("ort" if job.options.ort else "onnx", _DTYPES[job.options.dtype])
        job.facts |= write_decoder(job, spoken)
        if job.options.ort:
            write_fast(job.folder / FILE)
        write_config(job.source, job.folder)

    def verify(self, job: Job) -> Verification:
        import onnxruntime

        import runtime
        from export.onnx.check import check_file, check_fused
        from export.onnx.write import FILE

        job.progress.phase("loading back", 3)
        check_file(job.folder / FILE)
        fused = check_fused(job.folder / FILE, job.facts["compressed"])
        job.progress.step("fused")
        reference = probe(job)
        job.progress.step("the artifact")
        model = runtime.load(job.folder, device="cpu", verify=False)
        quantized = any(entry.scheme.activations is not None for entry in job.source.entries.values())
        key = (job.options.dtype, quantized)
        metrics = compare_logits(reference, model.logits, KL_LIMITS[key])
        metrics |= compare_tokens(
            reference, lambda prompts, count: model.generate(prompts, max_new_tokens=count, ignore_eos=True), TIES[key]
        )
        job.progress.step("the export")
        metrics["fused"] = ", ".join(f"{count} {name}" for name, count in fused.items()) or "nothing compressed"
        return Verification(
            f"onnx.checker and ONNX Runtime {onnxruntime.__version__} on the CPU through runtime.load",
            "valid, every compressed layer fused into its product, logits and greedy tokens those of the artifact",
            metrics,
        )

    def usage(self, job: Job, folder: str) -> list[str]:
        ask = 'model.generate("Once upon a time", max_new_tokens=32)'
        if not (job.folder / "tokenizer.json").is_file():
            ask = "model.generate([1, 2, 3], max_new_tokens=32)  # token ids: the artifact has no tokenizer"
        return [
            "import runtime",
            f'model = runtime.load("{folder}")  # kernels="fast" rounds activations to int8',
            f"print({ask})",
        ]


def _why_not(scheme: Scheme, shape: tuple[int, int], requantize: bool) -> str | None:
    acts = scheme.activations
    if acts is not None and acts.type == "float" and not acts.symmetric:
        return "fp8 activations with a zero point, which no ONNX operator computes"
    if scheme.weights is None or requantize:
        return None
    return why_not(scheme.weights, shape, ONNX)


def conversions(source: Source, spoken: Dialect) -> list[Conversion]:
    """What the graph says in other words than the artifact."""
    found: dict[tuple[str, bool], list[str]] = {}

    def say(what: str, module: str, exact: bool = True) -> None:
        found.setdefault((what, exact), []).append(module)

    for name, entry in source.entries.items():
        scheme, shape = entry.scheme, source.shapes[name]
        width = str(source.dtype).removeprefix("torch.")
        if name in source.embeddings:
            say(f"a compressed embedding is stored in {width}", name)
            continue
        if scheme.weights is None:
            say(f"{scheme.sparsity} zeros are stored like other values ({width})", name)
            continue
        changed = conversion(scheme.weights, shape, spoken.rules)
        if changed is not None:
            say(changed, name)
        if scheme.sparsity is not None:
            say(f"{scheme.sparsity} zeros are stored like other codes", name)
        if not spoken.own_operators and spoken.name == "onnx" and why_not(scheme.weights, shape, TENSORRT) is not None:
            say("blocks or zero points that ONNX Runtime reads and TensorRT does not", name)
    if spoken.dtype == torch.float16 and source.dtype != torch.float16:
        say(
            f"dense weights and scales are rounded from {str(source.dtype).removeprefix('torch.')} to float16",
            "all dense tensors",
            False,
        )
    return [Conversion(what, tuple(modules), exact) for (what, exact), modules in found.items()]


def write_fast(path: Path) -> None:
    """A second, small graph over the same data file: products may round activations to int8 (`kernels="fast"`)."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                attribute.i = 4
    onnx.save(model, str(path.with_name("model_fast.onnx")))


def write_config(source: Source, folder: Path) -> None:
    """config.json without the artifact's quantization_config, and the tokenizer."""
    config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    write_json(folder / "config.json", config)
    copy_tokenizer(source.path, folder)
