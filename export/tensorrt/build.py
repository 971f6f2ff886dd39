"""From a bundle's ONNX file to a plan: network, builder configuration, profiles, timing cache, serialization."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.target import Progress
from export.tensorrt.layers import Layers
from export.tensorrt.listeners import make_logger, make_monitor, reasons
from export.tensorrt.model import DecoderModel
from export.tensorrt.native import build_native, why_not
from export.tensorrt.options import TensorrtOptions
from export.tensorrt.parsed import build_parsed
from export.tensorrt.profiles import Limits, Range, native_profiles, parsed_profiles
from export.tensorrt.refit import write_constants
from export.tensorrt.weights import OnnxWeights
from runtime.errors import CompressError, RequestError
from runtime.system.sizes import byte_count

PLAN = "engine.plan"
CONSTANTS = "engine.safetensors"  # of a stripped plan of native layers
_NEEDED = ("add_attention_v2", "add_kv_cache_update", "add_rotary_embedding")


@dataclass(frozen=True)
class Request:
    """One engine.

    Attributes:
        onnx: the model in TensorRT's dialect. folder: where the plan goes.
        model, size: what is built, and for which limits.
        dtype: `DataType` member of floats. sparse: modules that are 2:4. aliases: of `OnnxWeights`.
        options: of the target.
    """

    onnx: Path
    folder: Path
    model: DecoderModel
    size: Limits
    dtype: str
    sparse: tuple[str, ...]
    aliases: dict[str, str]
    options: TensorrtOptions

    def weights(self) -> OnnxWeights:
        return OnnxWeights(self.onnx, self.aliases)


def build_engine(trt: Any, request: Request, progress: Progress) -> dict[str, Any]:
    """Write `engine.plan` (and what a stripped plan needs) into the request's folder.

    Returns:
        Facts for the manifest: route, inputs and outputs, profiles, flags, TensorRT's version.

    Raises:
        RequestError: an option that this TensorRT or this model does not allow. CompressError: TensorRT failed; its log says why.
    """
    options = request.options
    logger = make_logger(trt, progress)
    builder = trt.Builder(logger)
    # Since 11.0 networks are always strongly typed and the flag is ignored; before, it has to be set.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    route = choose_route(network, request, progress)
    progress.phase(f"network ({'TensorRT layers' if route == 'native' else 'ONNX parser'})", 1)
    keep, profiles = _fill(trt, network, logger, route, request)
    progress.step()
    config = _configure(trt, builder, request, progress)
    _add_profiles(builder, config, profiles)
    cache = _read_timings(config, options.timing_cache, progress)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise CompressError(f"TensorRT could not build the engine: {reasons(logger)}")
    (request.folder / PLAN).write_bytes(memoryview(plan))
    if cache is not None:
        _write_timings(config, Path(options.timing_cache or ""))
    constants = None
    if options.refit == "stripped":
        constants = _keep_constants(request, keep)
    return {
        "network": route,
        "plan": PLAN,
        "constants": constants,
        "tensorrt": str(trt.__version__),
        "inputs": [_describe(network.get_input(i)) for i in range(network.num_inputs)],
        "outputs": [_describe(network.get_output(i)) for i in range(network.num_outputs)],
        "layers": network.num_layers,
        "profiles": [{name: [list(s) for s in shapes] for name, shapes in p.items()} for p in profiles],
        "sparse_weights": bool(request.sparse),
        "weight_streaming": options.weight_streaming,
        "refit": options.refit,
        "version_compatible": options.version_compatible,
        "hardware_compatibility": options.hardware_compatibility,
    }


def choose_route(network: Any, request: Request, progress: Progress) -> str:
    """`native` or `onnx`.

    Raises:
        RequestError: native layers are wanted, and they cannot say the model.
    """
    wanted = request.options.network
    if wanted == "onnx":
        return "onnx"
    lacking = [name for name in _NEEDED if not hasattr(network, name)]
    reason = f"this TensorRT has no {lacking[0]}" if lacking else why_not(request.model, request.weights())
    if reason is None:
        return "native"
    if wanted == "native":
        raise RequestError(f"option network is native, but {reason}; choose onnx")
    progress.info(f"  the network comes from the ONNX parser, because {reason}")
    return "onnx"


def _fill(trt: Any, network: Any, logger: Any, route: str, request: Request) -> tuple[Any, list[dict[str, Range]]]:
    """The network's layers, and its profiles. What is returned first must live until the network is built."""
    if route == "native":
        layers = build_native(trt, network, request.weights(), request.model, request.size, request.dtype)
        return layers, native_profiles(request.model, request.size)
    parser = build_parsed(trt, network, logger, request.onnx)
    named = {network.get_input(i).name for i in range(network.num_inputs)}
    profiles = [{n: s for n, s in p.items() if n in named} for p in parsed_profiles(request.model, request.size)]
    missing = sorted(named - set(profiles[0]))
    if missing:
        raise CompressError(f"{request.onnx.name} has input {missing[0]}, which no profile is known for")
    return parser, profiles


def _configure(trt: Any, builder: Any, request: Request, progress: Progress) -> Any:
    options, flag = request.options, trt.BuilderFlag
    config = builder.create_builder_config()
    if request.dtype == "FLOAT":
        config.clear_flag(flag.TF32)  # float32 is asked for, so it is float32 that multiplies
    if request.sparse:
        config.set_flag(flag.SPARSE_WEIGHTS)
    if options.weight_streaming:
        config.set_flag(flag.WEIGHT_STREAMING)
    if options.refit == "refit":
        config.set_flag(flag.REFIT)
    if options.refit == "stripped":
        config.set_flag(flag.STRIP_PLAN)
        config.set_flag(flag.REFIT_IDENTICAL)
    if options.version_compatible:
        config.set_flag(flag.VERSION_COMPATIBLE)
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


def _read_timings(config: Any, path: str | None, progress: Progress) -> Any:
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


def _keep_constants(request: Request, keep: Any) -> str:
    """What is put back into a stripped plan when it is loaded: a file of constants, or the ONNX file itself."""
    if isinstance(keep, Layers):
        write_constants(keep.used, request.folder / CONSTANTS)
        return CONSTANTS
    return request.onnx.name


def _describe(tensor: Any) -> Mapping[str, Any]:
    return {"name": tensor.name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)}
