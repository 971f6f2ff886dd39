"""Engine of TensorRT exports, which `export.tensorrt` writes; their facts are in `export.json` under "tensorrt"."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.export_directory import Export
from runtime.engines.base import EngineOptions
from runtime.engines.rows import RowEngine
from runtime.engines.tensorrt.cache import Rows, Sizes
from runtime.engines.tensorrt.session import Gpu, Session, deserialize, make_logger
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.system.distribution import how_to_install
from runtime.system.sizes import byte_count

_SCRATCH = 64 << 20  # of a bound: buffers besides weights, context and cache


@dataclass
class TensorrtCache:
    """Rows of a batch, in parts of at most as many as the engine was built for."""

    parts: list[Rows] = field(default_factory=list)


class TensorrtEngine(RowEngine):
    """Runs a plan; see `runtime.engines.rows.RowEngine`.

    Args:
        session: the deserialized plan.
        facts: of `export.json`.
    """

    padding_is_exact = False  # what TensorRT's attention makes of a row that is masked whole is not documented

    def __init__(self, session: Session, facts: dict[str, Any]) -> None:
        self.session, self.device = session, session.gpu.device
        self.sizes = Sizes(session, facts)
        self.vocab_size = self.sizes.vocabulary
        self.context_length: int | None = self.sizes.max_length
        stat = session.trt.EngineStat.TOTAL_WEIGHTS_SIZE
        self.weight_bytes = int(session.engine.get_engine_stat(stat))
        self.description = f"TensorRT {session.trt.__version__}"

    def explain(self) -> dict[str, str]:
        """{"engine": what computes it}; TensorRT fuses layers into kernels of its own."""
        return {"engine": f"{self.description}, {self.session.engine.num_layers} kernels"}

    # ---------------------------------------------------------------- cache
    def new_cache(self) -> TensorrtCache:
        return TensorrtCache()

    def cache_bytes(self, cache: TensorrtCache) -> int:
        return sum(part.nbytes for part in cache.parts)

    @torch.inference_mode()
    def keep_rows(self, cache: TensorrtCache, rows: torch.Tensor) -> None:
        places = [(p, r) for p, part in enumerate(cache.parts) for r in range(part.rows)]
        kept, size = [places[row] for row in rows.tolist()], self.sizes.max_batch
        cache.parts = [Rows.join(self.sizes, cache.parts, kept[i : i + size]) for i in range(0, len(kept), size)]

    # ---------------------------------------------------------------- computing
    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: TensorrtCache | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        last_only: bool = False,
    ) -> torch.Tensor:
        cache = TensorrtCache() if cache is None else cache
        batch, width = input_ids.shape
        if not cache.parts:
            size = self.sizes.max_batch
            cache.parts = [Rows(self.sizes, min(size, batch - start)) for start in range(0, batch, size)]
        past = cache.parts[0].length
        if attention_mask is None:
            attention_mask = torch.ones(batch, past + width, dtype=torch.int64)
        if position_ids is None:
            position_ids = torch.arange(past, past + width).expand(batch, width)
        logits, start = [], 0
        for part in cache.parts:
            rows = slice(start, start + part.rows)
            ids, mask, places = (each[rows].to(self.device) for each in (input_ids, attention_mask, position_ids))
            logits.append(part.forward(ids, mask, places, last_only))
            start += part.rows
        return torch.cat(logits) if len(logits) > 1 else logits[0]


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
