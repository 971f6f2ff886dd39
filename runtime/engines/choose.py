"""Choice of the engine: of an artifact or checkpoint, of an export, and of what other packages bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

from runtime.checkpoint.export_directory import MANIFEST, Export
from runtime.config.plugins import entries
from runtime.engines.base import Engine, EngineOptions
from runtime.engines.native.storage import why_modules_store
from runtime.engines.streaming.cache import SMALLEST
from runtime.errors import ArtifactError, RequestError

if TYPE_CHECKING:
    from runtime.engines.blueprint import Blueprint
    from runtime.engines.streaming.prepared_file import PreparedFile
    from runtime.engines.torch.engine import TorchEngine
    from runtime.kv_cache.policy.policy import Policy

GROUP = "compress.engines"
# Targets whose exports this package runs: `load(export, device, options)` gives the engine.
_EXPORTS = {
    "onnx": "runtime.engines.onnx.engine:load_onnx",
    "tensorrt": "runtime.engines.tensorrt.engine:load_tensorrt",
}
# `take_over(engine, policy)` gives the fused engine of a device, or None where it does not fit.
FUSED_NAMES = {"cpu": "the decoder in C", "cuda": "the engine with CUDA graphs"}
_FUSED = {"cpu": "runtime.engines.native.take_over:take_over", "cuda": "runtime.engines.cuda.engine:take_over"}
# `why_modules_store(policy)` says what a policy asks for that the pages of a device's fused engine cannot do; None: nothing.
_STORES = {
    "cpu": "runtime.engines.native.storage:why_modules_store",
    "cuda": "runtime.engines.cuda.storage:why_modules_store",
}


@dataclass(frozen=True)
class EngineMethod:
    """An engine of another package: what an entry point of the group `compress.engines` names.

    Attributes:
        take_over: from the engine of transformers' modules to one that computes the same model faster, or None where it does not
            fit; asked before the fused engines of this package, unless the cache is compressed or a kernel was named.
        load_export: from an export, a device and `runtime.load`'s options to the engine that runs it; asked where the export's target
            is the name of the entry point.
    """

    take_over: Callable[[TorchEngine], Engine | None] | None = None
    load_export: Callable[[Export, torch.device, EngineOptions], Any] | None = None


def load_engine(
    blueprint: Blueprint, verify: bool = False, max_memory: int | None = None, policy: Policy | None = None
) -> Engine:
    """Read the weights and pick what computes.

    On CPUs the weights of larger artifacts, laid out for the kernels, are cached on disk and mapped from there.

    Args:
        blueprint: the model.
        verify: compare weights from the cache with their checksums.
        max_memory: bytes; blocks that do not fit are read while others compute.
        policy: how the KV cache is compressed; None: it is not.
    """
    if max_memory is None and not (blueprint.compressed and _is_large(blueprint) and blueprint.device.type == "cpu"):
        return choose_engine(blueprint.build(), blueprint, policy)
    from runtime.engines.streaming.load import NoCacheError, give_all, prepared_file, say_once

    try:
        file = prepared_file(blueprint, verify, max_memory)
        if max_memory is None:
            engine = choose_engine(give_all(blueprint, file), blueprint, policy)
            _remember(blueprint, file, engine)
            return engine
        from runtime.engines.streaming.engine import streamed

        return streamed(blueprint, file, max_memory, choose_engine, policy, why_modules(blueprint, policy))
    except NoCacheError as reason:
        if max_memory is not None:
            where = blueprint.artifact.path
            raise RequestError(f"max_memory: blocks of {where} cannot be read from disk: {reason}") from reason
        say_once(f"weights are laid out anew at every load: {reason}")
        blueprint.reset()
        return choose_engine(blueprint.build(), blueprint, policy)


def load_rank(blueprint: Blueprint, size: int, *options: Any) -> Engine:
    """The engine of this process's part of a model, one of `size` (`runtime.engines.cuda.tensor_parallel`).

    Args:
        blueprint: of the whole. options: what else must be alike on all ranks.
    """
    load: Callable[..., Engine] = resolve_name("runtime.engines.cuda.tensor_parallel:load")
    return load(blueprint, size, *options)


def recall_engine(blueprint: Blueprint, verify: bool = False, policy: Policy | None = None) -> Engine | None:
    """The native engine of a program that an earlier load has read, without transformers' code of the model; None: no such engine.

    Args:
        blueprint: the model. verify: compare weights from the cache with their checksums. policy: of its cache.
    """
    compressed, large = "quantization_config" in blueprint.artifact.config, _is_large(blueprint)
    if not (compressed and large and blueprint.device.type == "cpu") or blueprint.adapter is not None:
        return None
    if blueprint.kernels == "reference" or (blueprint.kernels == "auto" and entries(GROUP)):  # others are asked first
        return None
    if policy is not None and why_modules_store(policy) is not None:
        return None
    from runtime.engines.streaming.program_file import recall

    found = recall(blueprint, verify)
    return None if found is None or (policy is not None and found.hold(policy) is not None) else found


def _remember(blueprint: Blueprint, file: PreparedFile, engine: Engine) -> None:
    """Let later loads recall the program of an engine, if it is a native one."""
    from runtime.engines.native.engine import NativeEngine
    from runtime.engines.streaming.program_file import store

    if type(engine) is NativeEngine:
        store(blueprint, file, engine)


def _is_large(blueprint: Blueprint) -> bool:
    return blueprint.artifact.checkpoint.total_bytes >= SMALLEST


def choose_engine(engine: TorchEngine, blueprint: Blueprint, policy: Policy | None = None) -> Engine:
    """A fused engine where one fits (of another package, the decoder in C, the one with CUDA graphs), else the engine as it is.

    `why_modules` gives the reasons why none is tried.

    Raises:
        ConfigError: the model's cache cannot be as the policy says.
    """
    if blueprint.kernels == "auto" and policy is None and blueprint.adapter is None:
        for load in entries(GROUP).values():
            take_over = load().take_over
            found = None if take_over is None else take_over(engine)
            if found is not None:
                return found
    reason = why_modules(blueprint, policy)
    chosen = fused_engine(engine, policy) if reason is None else engine
    if policy is not None and chosen is engine:
        engine.why_modules = engine.why_modules or reason
        engine.compress_cache(policy)
    return chosen


def why_modules(blueprint: Blueprint, policy: Policy | None) -> str | None:
    """The reason, known before weights are read, why transformers' modules run a model; None: a fused engine may fit.

    Args:
        blueprint: the model. policy: of its cache.
    """
    device = blueprint.device
    if blueprint.kind != "decoder":
        return f"it is an {blueprint.kind}, and fused engines run decoders only"
    if policy is not None and device.type in _STORES:
        reason = resolve_name(_STORES[device.type])(policy)
        if reason is not None:
            return f"{FUSED_NAMES[device.type]} holds no cache whose policy says to {reason}"
    if blueprint.adapter is not None:
        return "it has an adapter, which fused engines do not support"
    if not blueprint.compressed and device.type != "cpu":
        return "none of its layers is compressed"
    if blueprint.kernels == "reference":
        return "reference kernels were requested"
    if device.type not in _FUSED:
        return f"there is no fused engine for {device.type}"
    return None


def describe_choice(blueprint: Blueprint, policy: Policy | None, brings_draft: bool) -> str:
    """Description of the engine that will run a model on its device, and of the effect of a cache policy and a draft."""
    why, fused = why_modules(blueprint, policy), FUSED_NAMES.get(blueprint.device.type, "the fused engine")
    modules = "transformers' modules with this runtime's kernels"
    if why is None:
        said = f"{fused} if it supports the model's structure, otherwise {modules}"
    else:
        faster = policy is not None and why_modules(blueprint, None) is None
        said = f"{modules}: {why}" + (
            f"; without the policy {fused} may run it, which decodes faster" if faster else ""
        )
    draft = "; its draft is used while it speeds decoding up" if brings_draft else ""
    return f"{blueprint.device.type}: {said}{draft}"


def fused_engine(engine: TorchEngine, policy: Policy | None = None) -> Engine:
    """The fused engine of the device where it computes the model, also a dense one, with a cache as `policy` says; else `engine`."""
    place = _FUSED.get(engine.device.type)
    return engine if place is None else resolve_name(place)(engine, policy) or engine


def load_export(export: Export, device: torch.device, options: EngineOptions) -> Any:
    """The engine that runs an export.

    Raises:
        RequestError: nothing here runs the target; the message says what does.
    """
    target, added = str(export.target), entries(GROUP)
    if target in _EXPORTS:
        load = resolve_name(_EXPORTS[target])
    else:
        load = added[target]().load_export if target in added else None
    if load is None:
        raise RequestError(
            f"{export.path} is an export to {target}, which its own engine runs (its README.md shows how); "
            f"this runtime loads artifacts and exports to {', '.join((*_EXPORTS, *added))}"
        )
    try:
        return load(export, device, options)
    except (KeyError, TypeError) as error:
        # Engines read their facts as they need them; what is missing there is the manifest's fault.
        if isinstance(error, KeyError) or "facts" in str(error):
            raise ArtifactError(f"{export.path / MANIFEST} does not say {error}, which its engine needs") from error
        raise
