"""TensorRT engine out of an ONNX file: TensorRT and GPU of this machine, parser, builder configuration, profiles, timing cache."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from export.target import Job
from export.tensorrt.bundle import ONNX, Build
from export.tensorrt.options import TensorrtOptions
from export.tensorrt.profiles import Limits, Range, profiles
from runtime.engines.tensorrt.session import make_logger
from runtime.errors import CompressError, first_line
from runtime.system.progress import ProgressReporter
from runtime.system.sizes import byte_count

PLAN = "engine.plan"
_ERRORS = 5  # of the log, that a message repeats
_PARSER_ERRORS = 3


def missing() -> str | None:
    """Why no engine can be built here, in a clause; None when one can."""
    if importlib.util.find_spec("tensorrt") is None:
        return "TensorRT is not installed (pip install tensorrt)"
    try:
        api()
    except (ImportError, OSError, RuntimeError) as error:  # what its loader raises where a CUDA library is not there
        return f"TensorRT is installed and cannot be imported ({first_line(error)})"
    return None if gpu() is not None else "there is no NVIDIA GPU that torch can use"


def api() -> Any:
    """The tensorrt module."""
    return importlib.import_module("tensorrt")


def gpu() -> dict[str, Any] | None:
    """Name, compute capability and memory of the first GPU, the only kind that an engine built here runs on; None: no GPU."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    capability = f"{found.major}.{found.minor}"
    return {"name": found.name, "compute_capability": capability, "memory_bytes": int(found.total_memory)}


def build_engine(trt: Any, job: Job, source: Path, build: Build, size: Limits) -> dict[str, Any]:
    """Write `engine.plan` into `job.folder`.

    Args:
        source: the folder of the ONNX file. build: what it is. size: the limits of the engine.

    Returns:
        Facts for the manifest: inputs and outputs, profiles, flags, TensorRT's version.

    Raises:
        RequestError: an option that this TensorRT or this model does not allow. CompressError: TensorRT failed; its log says why.
    """
    options: TensorrtOptions = job.options
    errors: list[str] = []

    def log(level: int, text: str) -> None:
        if level >= logging.ERROR:
            errors.append(text)
        elif level == logging.WARNING:
            job.progress.info(f"  TensorRT: {text}")

    logger = make_logger(trt, log)
    builder = trt.Builder(logger)
    # Since 11.0 networks are always strongly typed and the flag is ignored; before, it has to be set.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    job.progress.phase("parsing the network", 1)
    parser = _parse(trt, network, logger, source / ONNX)
    named = {network.get_input(i).name for i in range(network.num_inputs)}
    shapes = [{n: s for n, s in p.items() if n in named} for p in profiles(build.model, size)]
    missing = sorted(named - set(shapes[0]))
    if missing:
        raise CompressError(f"{ONNX} has input {missing[0]}, which no profile is known for")
    job.progress.step()
    config = _configure(trt, builder, build, options, job.progress)
    _add_profiles(builder, config, shapes)
    cache = _read_timings(config, options.timing_cache, job.progress)
    plan = builder.build_serialized_network(network, config)
    del parser  # it holds the weights, which the build reads
    if plan is None:
        reason = "; ".join(errors[:_ERRORS]) or "its log says no reason"
        raise CompressError(f"TensorRT could not build the engine: {reason}")
    (job.folder / PLAN).write_bytes(memoryview(plan))
    if cache is not None:
        _write_timings(config, Path(options.timing_cache or ""))
    return {
        "network": "onnx",
        "plan": PLAN,
        "constants": ONNX if options.refit == "stripped" else None,
        "tensorrt": str(trt.__version__),
        "inputs": [_describe(network.get_input(i)) for i in range(network.num_inputs)],
        "outputs": [_describe(network.get_output(i)) for i in range(network.num_outputs)],
        "layers": network.num_layers,
        "profiles": [{name: [list(s) for s in ranges] for name, ranges in p.items()} for p in shapes],
        "sparse_weights": bool(build.sparse),
        "weight_streaming": options.weight_streaming,
        "refit": options.refit,
        "version_compatible": options.version_compatible,
        "hardware_compatibility": options.hardware_compatibility,
    }


def _parse(trt: Any, network: Any, logger: Any, path: Path) -> Any:
    """Parse an ONNX file, its external data beside it, into `network`.

    Returns:
        The parser; keep it until the network is built, because it holds the weights.

    Raises:
        CompressError: the parser refused it; one sentence with node, operator and reason of the first errors.
    """
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        errors = []
        for error in map(parser.get_error, range(min(parser.num_errors, _PARSER_ERRORS))):
            where = f"{error.node_operator()} {error.node_name()}".strip() or f"node {error.node()}"
            errors.append(f"{where}: {' '.join(error.desc().split())}")
        rest = parser.num_errors - len(errors)
        more = f" (and {rest} more)" if rest > 0 else ""
        raise CompressError(f"TensorRT's parser refused {path.name}: {'; '.join(errors) or 'it says no reason'}{more}")
    return parser


def _configure(trt: Any, builder: Any, build: Build, options: TensorrtOptions, progress: ProgressReporter) -> Any:
    flag = trt.BuilderFlag
    config = builder.create_builder_config()
    if build.dtype == "FLOAT":
        config.clear_flag(flag.TF32)  # float32 is asked for, so it is float32 that multiplies
    for wanted, member in (
        (bool(build.sparse), flag.SPARSE_WEIGHTS),
        (options.weight_streaming, flag.WEIGHT_STREAMING),
        (options.refit == "refit", flag.REFIT),
        (options.refit == "stripped", flag.STRIP_PLAN),
        (options.refit == "stripped", flag.REFIT_IDENTICAL),
        (options.version_compatible, flag.VERSION_COMPATIBLE),
    ):
        if wanted:
            config.set_flag(member)
    level = getattr(trt.HardwareCompatibilityLevel, options.hardware_compatibility.upper())
    config.hardware_compatibility_level = level
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, byte_count("workspace", options.workspace))
    config.builder_optimization_level = options.optimization_level
    config.progress_monitor = make_monitor(trt, progress)
    return config


def _add_profiles(builder: Any, config: Any, profiles: list[dict[str, Range]]) -> None:
    for number, shapes in enumerate(profiles):
        profile = builder.create_optimization_profile()
        for name, (least, best, most) in shapes.items():
            profile.set_shape(name, least, best, most)
        if config.add_optimization_profile(profile) != number:
            raise CompressError(f"TensorRT refused profile {number} ({'prefill' if number == 0 else 'decode'})")


def _read_timings(config: Any, path: str | None, progress: ProgressReporter) -> Any:
    """The timing cache in use; None where none is wanted. One of another GPU or version is not used, and said so."""
    if path is None:
        return None
    stored = Path(path).read_bytes() if Path(path).is_file() else b""
    cache = config.create_timing_cache(stored)
    if not config.set_timing_cache(cache, False):
        progress.warn(f"the timing cache {path} is of another GPU or TensorRT version; it is written anew")
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _write_timings(config: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_bytes(memoryview(config.get_timing_cache().serialize()))
    os.replace(beside, path)


def _describe(tensor: Any) -> Mapping[str, Any]:
    return {"name": tensor.name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)}


def make_monitor(trt: Any, progress: ProgressReporter) -> Any:
    """An `IProgressMonitor` that shows the outermost phases as bars. TensorRT calls it from several threads."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._lock = threading.Lock()
            self._shown: str | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                if not parent_phase:
                    self._shown = phase_name
                    progress.phase(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with self._lock:
                if phase_name == self._shown:
                    progress.step()
            return True  # go on

        def phase_finish(self, phase_name: str) -> None:
            """Nothing to show: the next phase begins its own bar."""

    return Monitor()
