"""Engine of TensorRT exports, which `export.tensorrt` writes; their facts are in `export.json` under "tensorrt"."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.export_directory import Export
from runtime.engines.base import EngineOptions
from runtime.engines.past_present import LOGITS_BYTES, PastPresentEngine
from runtime.engines.tensorrt.session import DECODE, DTYPES, PREFILL, Gpu, Session, deserialize, make_logger
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.system.distribution import how_to_install
from runtime.system.sizes import byte_count

_SCRATCH = 64 << 20  # of a bound: buffers besides weights, context and cache


class TensorrtEngine(PastPresentEngine):
    """Runs a plan; see `runtime.engines.rows.RowEngine`.

    Args:
        session: the deserialized plan.
        facts: of `export.json`.
    """

    padding_is_exact = False  # what TensorRT's attention makes of a row that is masked whole is not documented

    def __init__(self, session: Session, facts: dict[str, Any]) -> None:
        self.session, self.device, limits = session, session.gpu.device, facts["limits"]
        self.max_batch, self.max_prompt = int(limits["max_batch"]), int(limits["max_prompt"])
        self.max_length = int(limits["max_length"])
        self.context_length: int | None = self.max_length
        self.vocab_size = int(facts["vocabulary"])
        self.cache_shapes = [(int(facts["kv_heads"]), int(facts["head_dim"]))] * int(facts["layers"])
        types = {tensor["name"]: DTYPES[tensor["dtype"]] for tensor in [*facts["inputs"], *facts["outputs"]]}
        self.dtype, self.logits_dtype = types["past_key_values.0.key"], types["logits"]
        self._takes = frozenset(tensor["name"] for tensor in facts["inputs"])
        stat = session.trt.EngineStat.TOTAL_WEIGHTS_SIZE
        self.weight_bytes = int(session.engine.get_engine_stat(stat))
        self.description = f"TensorRT {session.trt.__version__}"

    def explain(self) -> dict[str, str]:
        """{"engine": what computes it}; TensorRT fuses layers into kernels of its own."""
        return {"engine": f"{self.description}, {self.session.engine.num_layers} kernels"}

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        width = inputs["input_ids"].shape[1]
        profile = DECODE if width == 1 and inputs["attention_mask"].shape[1] > width else PREFILL
        self.session.run(profile, {name: value for name, value in inputs.items() if name in self._takes}, outputs)

    def part(self, batch: int, width: int, past: int) -> tuple[int, int]:
        """A prefill where the profile has room for it, else a column."""
        rows = min(batch, self.max_batch)
        fitting = LOGITS_BYTES // (rows * self.vocab_size * self.logits_dtype.itemsize)
        room = past <= self.max_length - self.max_prompt
        return rows, max(1, min(width, self.max_prompt, fitting)) if room else 1


def load_tensorrt(export: Export, device: torch.device, options: EngineOptions) -> TensorrtEngine:
    """The engine of a TensorRT export.

    Args:
        export: the directory and its facts. device: a GPU.
        options: of `runtime.load`. `max_memory` bounds the weights on the GPU of engines built with weight
            streaming; the others are fixed when an engine is built and may only be left at their defaults.

    Raises:
        RequestError: a bundle, no TensorRT, no GPU, an option that cannot be. ArtifactError: the plan is for another GPU or version.
    """
    facts = export.facts
    if not facts.get("engine"):
        how = f"finish it, on a machine with TensorRT and the GPU that is to run it, with {finishing(str(export.path))}"
        raise RequestError(f"no engine was built in {export.path}; {how}")
    if facts.get("network") != "onnx":
        raise ArtifactError(f"{export.path} was built of TensorRT's own layers by an earlier version; export it again")
    bound = _check_options(options, facts)
    gpu = make_gpu(device)
    trt = tensorrt_module(facts)
    _check_fits(export.path, facts, trt, gpu)
    logger = make_logger(trt)
    with gpu.work():  # TensorRT loads a plan into the current device
        runtime, engine = deserialize(trt, logger, export.path / str(facts["plan"]), bool(facts["version_compatible"]))
        if facts["refit"] == "stripped":
            _put_weights(trt, logger, engine, export.path / str(facts["constants"]))
        if facts["weight_streaming"]:
            engine.weight_streaming_budget_v2 = _budget(engine, bound)
        return TensorrtEngine(Session(trt, engine, gpu, (runtime, logger)), facts)


def _put_weights(trt: Any, logger: Any, engine: Any, path: Path) -> None:
    """Give `engine`, whose plan is stripped, its weights back from the ONNX file beside it.

    Raises:
        ArtifactError: the file is missing. CompressError: TensorRT refused a weight, or lacks one.
    """
    if not path.is_file():
        raise ArtifactError(f"{path} is missing; the plan has no weights without it")
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(path)):
        reason = " ".join(parser.get_error(0).desc().split()) if parser.num_errors else "it says no reason"
        raise CompressError(f"TensorRT refused the weights of {path.name}: {reason}")
    missing = refitter.get_missing_weights()
    if missing:
        raise CompressError(f"{path.name} lacks {missing[0]}, which the plan needs")
    if not refitter.refit_cuda_engine():
        raise CompressError(f"TensorRT could not put the weights of {path.name} into the engine; its log says why")


def finishing(bundle: str) -> str:
    """The command that makes an engine of a bundle, as a shell reads it."""
    return f"compress export {shlex.quote(bundle)} --target tensorrt --output {shlex.quote(f'{bundle}-engine')}"


def make_gpu(device: torch.device) -> Gpu:
    """Where the engine runs; RequestError for anything but an NVIDIA GPU."""
    if device.type != "cuda":
        raise RequestError(f"a TensorRT engine runs on an NVIDIA GPU, not on {device.type}; load the artifact itself")
    return Gpu(device)


def _check_options(options: EngineOptions, facts: dict[str, Any]) -> int | None:
    """The bound of `max_memory` in bytes; RequestError for what an engine cannot change any more."""
    for name, value in vars(options).items():
        if name not in ("max_memory", "threads") and value not in (None, "auto"):
            raise RequestError(f"{name} is fixed when a TensorRT engine is built; leave it out")
    bound = options.max_memory
    if bound is None:
        return None
    if not facts["weight_streaming"]:
        raise RequestError("max_memory: the engine was built without weight streaming; export with weight_streaming")
    return byte_count("max_memory", bound)


def _budget(engine: Any, bound: int | None) -> int:
    """Bytes of streamable weights that stay on the GPU."""
    if bound is None:
        return int(engine.get_weight_streaming_automatic_budget())
    fixed = int(engine.device_memory_size_v2) + _SCRATCH
    if bound <= fixed:
        raise RequestError(f"max_memory of {bound} bytes is too little: a step alone takes {fixed}")
    return min(bound - fixed, int(engine.streamable_weights_size))


def tensorrt_module(facts: dict[str, Any]) -> Any:
    """The tensorrt module; version compatible plans run with the lean one too."""
    lean = ["tensorrt_lean"] if facts["version_compatible"] and facts["refit"] != "stripped" else []
    broken = None
    for name in ("tensorrt", *lean):
        try:
            if importlib.util.find_spec(name) is not None:
                return importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # as its loader does where a CUDA library is not there
            broken = broken or f"{name} is installed and cannot be imported: {' '.join(str(error).split())}"
    why = f"; {broken}" if broken else f", which is not installed: {how_to_install('tensorrt')}"
    raise RequestError(f"a TensorRT engine needs tensorrt{why}")


def _check_fits(path: Path, facts: dict[str, Any], trt: Any, gpu: Gpu) -> None:
    """ArtifactError where TensorRT or the GPU is another than the plan was built for."""
    here, built = str(trt.__version__), str(facts["tensorrt"])
    if here != built and not facts["version_compatible"]:
        raise ArtifactError(f"{path} was built with TensorRT {built}, and {here} is installed; build it again")
    major, minor = gpu.capability
    wanted, level = facts["gpu"]["compute_capability"], facts["hardware_compatibility"]
    fits = (major, minor) >= (8, 0) if level == "ampere_plus" else wanted == f"{major}.{minor}"
    if not fits:
        built_for = f"{facts['gpu']['name']} (compute capability {wanted})"
        raise ArtifactError(f"{path} was built for {built_for}, and this GPU has {major}.{minor}; build it again")
