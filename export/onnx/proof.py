"""Proof of an ONNX export: valid, fused, loaded back with `runtime.load`, and compared in float32 with the artifact, changed alike
where layers were rounded anew."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from export.onnx.conversions import changes
from export.onnx_graph.change import expect, load_changed
from export.onnx_graph.dialect import Dialect, dialect_of, fast_name, layer_rules
from export.onnx_graph.grid import FLOAT8, ONNX, Grid, to_grid
from export.target import Job, Verification
from export.verify import TIE, Probe, compare_logits, compare_tokens, generate, load_artifact
from runtime.errors import CompressError, first_line

# What ONNX Runtime calls the casts it puts around nodes for which its CPU provider has no float16 kernel.
INSERTED = ("InsertedPrecisionFreeCast_", "InsertedCast_")
# Products that read compressed weights as they are.
FUSED = (
    "MatMulNBits", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm", "MatMulBnb4",
)  # fmt: skip


def check_file(path: Path) -> None:
    """ONNX's own checker with full shape inference. CompressError when it objects: that is a bug of ours."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    foreign = [node for node in model.graph.node if node.op_type == "SimplifiedLayerNormalization"]
    for node in foreign:  # ONNX Runtime's own, which it nevertheless keeps in ONNX's domain
        node.domain = "com.microsoft"
    checked = path.with_name(f".{path.name}.checked") if foreign else path
    try:
        if foreign:
            onnx.save(model, str(checked))
        onnx.checker.check_model(str(checked), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise CompressError(f"{path.name} is no valid ONNX: {first_line(error)}") from error
    finally:
        if foreign:
            checked.unlink(missing_ok=True)


def optimized(path: Path, entries: dict[str, str] | None = None) -> Any:
    """The graph that ONNX Runtime runs on a CPU, as an onnx `ModelProto` without its weights; `entries` as in `check_fused`."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    accuracy = {"session.qdq_matmulnbits_accuracy_level": "1"}
    for name, value in (accuracy | (entries or {})).items():
        options.add_session_config_entry(name, value)
    # Extended, not all: layouts of one machine's vector units would hide what is looked for.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.data")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath, load_external_data=False)


def unfused(model: Any, half: bool = False) -> list[str]:
    """Nodes of an optimized graph that would compute the same thing from constants at every call.

    Args:
        half: a float16 graph. CPUs have no float16 kernels for most of its nodes, and the runtime widens their constants at every
            call; the file does not have those casts, and they are not made where the graph is meant to run. What is
            computed from what they widen still counts.
    """
    constants = {value.name for value in model.graph.initializer}
    found = []
    for node in model.graph.node:
        inputs = [name for name in node.input if name]
        again = bool(inputs) and all(name in constants for name in inputs)
        if node.op_type == "DequantizeLinear":
            again = bool(inputs) and inputs[0] in constants
        own = half and node.op_type == "Cast" and node.name.startswith(INSERTED)
        if again and not own and node.op_type not in ("Identity", "Shape", "ConstantOfShape"):
            found.append(node.name or node.output[0])
        if all(name in constants for name in inputs):
            constants.update(node.output)
    return found


def check_fused(
    path: Path, compressed: int, entries: dict[str, str] | None = None, half: bool = False
) -> dict[str, int]:
    """{operator: how often} of the products that read compressed weights, in ONNX Runtime's optimized graph.

    Args:
        compressed: how many there must be.
        entries: settings of the session that the export asks for.
        half: the graph is in float16, see `unfused`.

    Raises:
        CompressError: one was not fused, or something is computed from constants at every call.
    """
    model = optimized(path, entries=entries)
    late = unfused(model, half)
    if late:
        raise CompressError(f"{path.name}: ONNX Runtime would compute {late[0]} from constants at every call")
    counts = Counter(node.op_type for node in model.graph.node if node.op_type in FUSED)
    if sum(counts.values()) != compressed:
        raise CompressError(f"{path.name}: ONNX Runtime fused {sum(counts.values())} of {compressed} compressed layers")
    return dict(counts)


# Mean KL that is allowed. float32: only the order of sums differs; float16: every activation is rounded to 11 bits. Where
# activations are quantized, a sum in another order may put one of them on the neighbouring code.
KL_LIMITS = {("float32", False): 1e-5, ("float32", True): 5e-3, ("float16", False): 1e-2, ("float16", True): 2e-2}
TIES = {("float32", False): TIE, ("float32", True): 0.5, ("float16", False): 0.5, ("float16", True): 1.0}
# Cosine distance of hidden states that is allowed, the worst of all tokens.
COSINE_LIMITS = {("float32", False): 1e-5, ("float32", True): 2e-2, ("float16", False): 1e-3, ("float16", True): 2e-2}
# Of the second graph, whose products round their inputs to int8 in blocks, for kernels="fast": KL and cosine distance.
FAST_LIMIT = 5e-2
# Bytes of weights over those expected, and the difference that is nothing to speak of.
SIZE_LIMIT, SMALL = 1.05, 64 << 10

Load = Callable[[str], Any]  # kernels -> the export as `runtime.load` gives it
Compared = tuple[str, dict[str, Any]]  # what was compared, in a clause; metrics


def prove(job: Job, products: dict[str, int]) -> Verification:
    """Load `job.folder` back and compare.

    Args:
        products: {file: products with compressed weights in it}.

    Raises:
        CompressError: a graph is invalid, a compressed layer is not fused, or the numbers are not the artifact's.
    """
    import onnxruntime

    import runtime

    job.progress.phase("loading back", 3 + len(products))
    fused: Counter[str] = Counter()
    fast = False
    for file, compressed in products.items():
        counts = _check(job, file, compressed)
        if (job.folder / fast_name(file)).is_file():
            fast, counts = True, _check(job, fast_name(file), compressed)
        fused.update(counts)
        job.progress.step(file)
    same = read_back(job, list(products))
    job.progress.step("codes and scales")
    quantized = any(entry.scheme.activations is not None for entry in job.source.entries.values())

    def load(kernels: str) -> Any:
        return runtime.load(job.folder, device="cpu", verify=False, kernels=kernels)

    compare = {"decoder": _decoder, "encoder": _encoder, "encoder-decoder": _seq2seq}[job.facts["kind"]]
    checked, metrics = compare(job, load, (job.options.dtype, quantized), fast)
    job.progress.step("the export")
    metrics["size"] = size_ratio(job)
    if same:
        same_codes = f"codes and scales of {same} layers bit for bit"
        checked = f"every compressed layer fused into its product, {same_codes}, {checked}"
    metrics["fused"] = ", ".join(f"{count} {name}" for name, count in fused.items()) or "nothing compressed"
    loader = f"onnx.checker and ONNX Runtime {onnxruntime.__version__} on the CPU through runtime.load"
    return Verification(loader, f"valid, {checked}", metrics)


def _check(job: Job, file: str, compressed: int) -> dict[str, int]:
    check_file(job.folder / file)
    return check_fused(job.folder / file, compressed, job.facts.get("session"), half=job.options.dtype == "float16")


def _decoder(job: Job, load: Load, key: tuple[str, bool], fast: bool) -> Compared:
    expected = expect(job, ONNX)
    job.progress.step("the artifact")
    reference = expected.probe
    model = load("auto")
    metrics = compare_logits(reference, model.logits, KL_LIMITS[key]) | expected.change
    metrics |= compare_tokens(reference, partial(generate, model), TIES[key])
    if fast:
        del model
        gc.collect()
        metrics["kl_fast"] = compare_logits(reference, load("fast").logits, FAST_LIMIT)["kl"]
    return "logits and greedy tokens those of the artifact", metrics


def _encoder(job: Job, load: Load, key: tuple[str, bool], fast: bool) -> Compared:
    ids, mask = _sources(job)

    def states(model: Any) -> torch.Tensor:
        return model.hidden_states(ids, mask)[mask.bool()]

    wanted = states(_reference(job))
    change = {"cosine_of_change": _cosine(states(load_artifact(job.source)), wanted)} if job.losses else {}
    gc.collect()
    job.progress.step("the artifact")
    found = states(load("auto"))
    metrics = {
        "cosine_mean": float(torch.nn.functional.cosine_similarity(wanted, found, dim=-1).mean()),
        "cosine_worst": _cosine(wanted, found),
        "difference": float((wanted - found).abs().max()),
        "tokens": int(mask.sum()),
        **change,
    }
    limits = {"cosine_worst": COSINE_LIMITS[key]}
    if fast:
        metrics["cosine_fast"] = _cosine(wanted, states(load("fast")))
        limits["cosine_fast"] = FAST_LIMIT
    for name, limit in limits.items():
        if not metrics[name] >= 1 - limit:
            raise CompressError(
                f"the export does not compute what the artifact does: {name} of hidden states is {metrics[name]:.6f}, "
                f"allowed {1 - limit:g}"
            )
    return "hidden states those of the artifact, alone and padded", metrics


def _cosine(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Cosine similarity of hidden states `[tokens, hidden]`, the worst of all tokens."""
    return float(torch.nn.functional.cosine_similarity(wanted, found, dim=-1).min())


def _seq2seq(job: Job, load: Load, key: tuple[str, bool], fast: bool) -> Compared:
    ids, mask = _sources(job)
    sources = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
    reference = _reference(job)
    written = generate(reference, sources, 16)
    targets = torch.tensor([[reference.start_token_id, *row[:-1]] for row in written])

    def forced(model: Any) -> torch.Tensor:
        return torch.cat([model.logits(torch.tensor([s]), t[None]) for s, t in zip(sources, targets, strict=True)])

    # The decoder's prompts are the token that it starts with.
    expected = Probe([row[:1].tolist() for row in targets], targets, forced(reference), written)
    del reference
    change = {}
    if job.losses:
        original = replace(expected, logits=forced(load_artifact(job.source)))
        change["kl_of_change"] = compare_logits(original, lambda rows: expected.logits, float("inf"))["kl"]
    gc.collect()
    job.progress.step("the artifact")
    model = load("auto")
    metrics = compare_logits(expected, lambda rows: forced(model), KL_LIMITS[key]) | change
    metrics |= compare_tokens(expected, lambda prompts, count: generate(model, sources, count), TIES[key])
    if fast:
        metrics["kl_fast"] = compare_logits(expected, lambda rows: forced(load("fast")), FAST_LIMIT)["kl"]
    return "teacher-forced logits and greedy tokens those of the artifact", metrics


def _reference(job: Job) -> Any:
    """The model that the export must compute what it does: the artifact's, or that with the same layers rounded anew.

    Every dialect of this target rounds by the same rules.
    """
    return load_changed(job, ONNX) if job.losses else load_artifact(job.source)


def _sources(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask `[8, 16]` of different lengths; ids at random, since encoders write no texts of their own."""
    generator = torch.Generator().manual_seed(0)
    limit = min(16, int(job.facts.get("context_length") or 16))
    ids = torch.randint(2, int(job.facts["vocab_size"]), (8, limit), generator=generator)
    lengths = torch.tensor([max(1, limit - i) for i in range(8)])
    mask = (torch.arange(limit)[None] < lengths[:, None]).long()
    return ids * mask, mask


def size_ratio(job: Job) -> float:
    """Bytes of the weights' files over those of the artifact's tensors and what conversions were said to add; warns beyond 5 %."""
    # a small model's constants are in the graph
    files = list(job.folder.glob("*.data")) or list(job.folder.glob("*.onnx"))
    stored = sum(file.stat().st_size for file in files)
    said = changes(job.source, dialect_of(job.options))
    expected = job.source.bytes + sum(change.bytes or 0 for change in said)
    ratio = stored / expected
    if ratio > SIZE_LIMIT and stored - expected > SMALL:
        job.progress.warn(f"the weights take {ratio:.2f} times the bytes that artifact and conversions account for")
    return round(ratio, 4)


# Codes, scales and zero points read from the files that were written, and compared bit for bit with the artifact's. Where inputs are
# rounded to int8 a sum in another order moves tokens by more than a wrong scale of one layer does, so that numbers alone would let such
# a scale pass.
CODES, SCALE, ZERO = "weight_codes", "weight_scale", "weight_zero_point"


def read_back(job: Job, files: list[str]) -> int:
    """How many compressed layers of `files` (in `job.folder`) were compared; one is in memory at a time.

    Raises:
        CompressError: a constant is not what the artifact has there, or belongs to no layer of it; a decoder's layer has none.
    """
    spoken, compared = dialect_of(job.options), set()
    for file in files:
        constants = _Constants(job.folder / file)
        for stem in [name.removesuffix(f".{CODES}") for name in constants.stored if name.endswith(f".{CODES}")]:
            modules = modules_of(stem)
            unknown = next((m for m in modules if m not in job.source.entries), None)
            if unknown is not None:
                raise CompressError(f"{file} has codes of {unknown}, which the artifact does not compress")
            start = 0
            found = constants.grid(stem, spoken)
            for module in modules:
                scheme = job.source.entries[module].scheme
                wanted = to_grid(job.source.weight(module), layer_rules(scheme, spoken), job.options.requantize, module)
                columns = wanted.codes.shape[1]
                wrong = difference(_columns(found, start, columns, wanted), wanted, spoken.dtype)
                if wrong is not None:
                    raise CompressError(f"{file} does not hold the artifact's {wrong} of {module}")
                start += columns
                compared.add(module)
            if start != found.codes.shape[1]:
                raise CompressError(f"{file} has {found.codes.shape[1]} columns of codes under {stem}, not {start}")
        second = job.folder / fast_name(file)
        if second.is_file() and constants.stored != _Constants(second).stored:
            raise CompressError(f"{second.name} has other weights than {file}")
    # encoders are written without their heads
    entries = job.source.entries if job.facts.get("kind") == "decoder" else {}
    for module, entry in entries.items():
        if entry.scheme.grid is not None and module not in job.source.embeddings and module not in compared:
            raise CompressError(f"no file has codes of {module}, which the artifact compresses")
    return len(compared)


def modules_of(stem: str) -> list[str]:
    """`block.q+k+v` is `block.q`, `block.k` and `block.v` side by side (`export.onnx_graph.linear.joined`)."""
    first, *rest = stem.split("+")
    block = first.rpartition(".")[0]
    return [first, *(f"{block}.{name}" if block else name for name in rest)]


def difference(found: Grid, wanted: Grid, dtype: torch.dtype) -> str | None:
    """What of a written weight is not the artifact's; None where all of it is.

    Args:
        dtype: of the graph; where that is float16 a scale may have been rounded to it.
    """
    codes = [grid.codes.view(torch.uint8) if grid.codes.dtype == FLOAT8 else grid.codes for grid in (found, wanted)]
    if not torch.equal(*codes):
        return "codes"
    scale = wanted.scale.float()
    if found.scale.dtype == torch.float16 and dtype == torch.float16:
        scale = wanted.scale.to(torch.float16).float()
    if not torch.equal(found.scale.float(), scale):
        return "scales"
    ours, theirs = found.zero_point, wanted.zero_point
    same = ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)
    return None if same else "zero points"


def _columns(found: Grid, start: int, count: int, like: Grid) -> Grid:
    """`count` columns, with scales in the shape of `like` where that is the same number of them."""
    stop = start + count
    scale = found.scale[..., start:stop] if found.scale.numel() > 1 else found.scale
    if like.block is None and scale.numel() == like.scale.numel():
        scale = scale.reshape(like.scale.shape)  # one scale in all is kept as a vector or as a scalar
    zero = None if found.zero_point is None else found.zero_point[..., start:stop]
    return Grid(found.codes[:, start:stop], found.bits, scale, zero, like.block)


class _Constants:
    """Constants of one file by their names; values are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        import onnx

        self.path = path
        graph = onnx.load(str(path), load_external_data=False).graph
        self.stored = {value.name: value for value in graph.initializer}
        self.packed = {  # codes as MatMulNBits has them, with the inputs that they are padded from
            node.input[1]: {a.name: a.i for a in node.attribute} for node in graph.node if node.op_type == "MatMulNBits"
        }

    def grid(self, stem: str, spoken: Dialect) -> Grid:
        """Codes `[K, N]` and what belongs to them; CompressError where there is no scale."""
        codes, scale, zero = (self.read(f"{stem}.{part}") for part in (CODES, SCALE, ZERO))
        if codes is None or scale is None:
            raise CompressError(f"{self.path.name} has no scales for {stem}")
        shape = self.packed.get(f"{stem}.{CODES}")
        if shape is None:
            return Grid(codes, 8, scale, zero, None)
        assert spoken.own_operators
        bits, inputs, block = shape["bits"], shape["K"], shape["block_size"]
        if zero is not None:
            zero = _signed(zero, bits)[:, : scale.shape[1]].t()
        return Grid(_signed(codes, bits)[:, :inputs].t(), bits, scale.t(), zero, block)

    def read(self, name: str) -> torch.Tensor | None:
        """One constant: int8 for 4-bit codes too, float8 as it is."""
        import numpy
        from onnx import TensorProto, numpy_helper

        stored = self.stored.get(name)
        if stored is None:
            return None
        copy: Any = TensorProto()
        copy.CopyFrom(stored)  # else every matrix would stay in memory
        values = numpy_helper.to_array(copy, str(self.path.parent))
        if copy.data_type == TensorProto.FLOAT8E4M3FN:
            return torch.from_numpy(values.view(numpy.uint8).copy()).view(FLOAT8)
        if copy.data_type == TensorProto.INT4:
            values = values.astype(numpy.int8)
        return torch.from_numpy(values.copy())


def _signed(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[N, ...]` of MatMulNBits as int8 codes `[N, codes]`; the earlier of two 4-bit codes is in the low half."""
    flat = packed.reshape(packed.shape[0], -1)
    if bits == 4:
        flat = torch.stack([flat & 15, flat >> 4], -1).reshape(packed.shape[0], -1)
    return (flat.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
