"""The engine for a directory: weights from the cache or the artifact, all of them in memory or some, the decoder in C or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.engines.base import Engine
from runtime.engines.streaming.cache import SMALLEST
from runtime.engines.torch.engine import Blueprint, TorchEngine
from runtime.errors import RequestError

if TYPE_CHECKING:
    from runtime.kv_cache.policy.policy import Policy


def load_engine(
    blueprint: Blueprint, verify: bool = False, max_memory: int | None = None, policy: Policy | None = None
) -> Engine:
    """Read the weights and pick what computes.

    On CPUs the weights of larger artifacts, as the kernels read them, are kept in a cache and mapped from there.

    Args:
        blueprint: the model.
        verify: compare weights from the cache with their checksums.
        max_memory: bytes; blocks that do not fit are read while others compute.
        policy: how keys and values are held; None: as they come.
    """
    large = blueprint.artifact.checkpoint.total_bytes >= SMALLEST
    if max_memory is None and not (blueprint.compressed and large and blueprint.device.type == "cpu"):
        return lean(blueprint.build(), blueprint, policy)
    from runtime.engines.streaming.load import NoCacheError, give_all, prepared_file, say_once

    try:
        if max_memory is not None:
            from runtime.engines.streaming.engine import refuse_early, streamed

            refuse_early(blueprint, max_memory)
        file = prepared_file(blueprint, verify, streams=max_memory is not None)
        if max_memory is not None:
            return streamed(blueprint, file, max_memory, policy)
        return lean(give_all(blueprint, file), blueprint, policy)
    except NoCacheError as reason:
        if max_memory is not None:
            where = blueprint.artifact.path
            raise RequestError(f"max_memory: blocks of {where} cannot be read from disk: {reason}") from reason
        say_once("weights are laid out anew at every load: %s", reason)
        blueprint.reset()
        return lean(blueprint.build(), blueprint, policy)


def lean(engine: TorchEngine, blueprint: Blueprint, policy: Policy | None = None) -> Engine:
    """The lean engine of the device where it fits (the decoder in C, or the one with CUDA graphs), else the engine as it is.

    Lean engines have caches of their own, which are plain: with a policy transformers' modules compute.
    """
    if policy is not None:
        engine.compress_cache(policy)
        return engine
    if not blueprint.compressed or blueprint.kernels == "reference":
        return engine
    if blueprint.device.type == "cuda":
        from runtime.engines.cuda import take_over as take_over_cuda

        return take_over_cuda(engine) or engine
    if blueprint.device.type != "cpu":
        return engine
    from runtime.engines.native.engine import take_over

    return take_over(engine) or engine
