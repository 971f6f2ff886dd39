"""Builder, its configuration, profiles and timing cache. A plan is a number under which the network is kept."""

from __future__ import annotations

from typing import Any

from fake_tensorrt.listing import Listed
from fake_tensorrt.network import INetworkDefinition

PLANS: dict[int, Any] = {}


class HostMemory(bytes):
    """`IHostMemory`: bytes behind the buffer protocol."""

    @property
    def nbytes(self) -> int:
        return len(self)


class IOptimizationProfile(Listed):
    _name = "IOptimizationProfile"

    def do_set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        shapes = tuple(tuple(int(n) for n in shape) for shape in (min, opt, max))
        assert len({len(shape) for shape in shapes}) == 1, f"{input}: shapes of different ranks"
        assert all(0 <= a <= b <= c for a, b, c in zip(*shapes, strict=True)), f"{input}: {shapes}"
        self._state.setdefault("_shapes", {})[input] = shapes


class ITimingCache(Listed):
    _name = "ITimingCache"

    def do_serialize(self) -> HostMemory:
        return HostMemory(b"timings")


class IBuilderConfig(Listed):
    _name = "IBuilderConfig"

    def _set_up(self) -> Any:
        self._flags, self._profiles, self._pools, self._cache = set(), [], {}, None
        return self

    def do_set_flag(self, flag: Any) -> None:
        self._flags.add(flag.name)

    def do_clear_flag(self, flag: Any) -> None:
        self._flags.discard(flag.name)

    def do_add_optimization_profile(self, profile: Any) -> int:
        self._profiles.append(profile._state["_shapes"])
        return len(self._profiles) - 1

    def do_set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._pools[pool.name] = pool_size

    def do_create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
        made = ITimingCache._make()
        made._data = bytes(serialized_timing_cache)
        return made

    def do_set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        if cache._data.startswith(b"foreign") and not ignore_mismatch:
            return False
        self._cache = cache
        return True

    def do_get_timing_cache(self) -> Any:
        return self._cache


class Builder(Listed):
    """`last`: the network and configuration of the build that came last, in any builder."""

    _name = "Builder"
    last: Any = None

    def do_create_network(self, flags: int = 0) -> Any:
        return INetworkDefinition._empty()

    def do_create_builder_config(self) -> Any:
        return IBuilderConfig._make()._set_up()

    def do_create_optimization_profile(self) -> Any:
        return IOptimizationProfile._make()

    def do_build_serialized_network(self, network: Any, config: Any) -> HostMemory:
        _check_profiles(network, config)
        assert network._onnx is not None, "an empty network"
        monitor = config.progress_monitor
        if monitor is not None:
            monitor.phase_start("Building", None, 2)
            monitor.phase_start("Tactics", "Building", 1)
            monitor.step_complete("Tactics", 0)
            monitor.phase_finish("Tactics")
            assert all(monitor.step_complete("Building", step) for step in range(2))
            monitor.phase_finish("Building")
        PLANS[len(PLANS)] = {"network": network, "config": config}
        Builder.last = (network, config)
        return HostMemory(f"plan {len(PLANS) - 1}".encode())


def _check_profiles(network: Any, config: Any) -> None:
    """Every input with a free dimension has shapes in every profile, and they agree with what is fixed."""
    assert config._profiles, "a network with free dimensions needs a profile"
    for shapes in config._profiles:
        for tensor in network._inputs:
            assert tensor.name in shapes, f"{tensor.name} has no shapes"
            for shape in shapes[tensor.name]:
                assert len(shape) == len(tensor.shape), f"{tensor.name}: rank"
                assert all(a in (-1, b) for a, b in zip(tensor.shape, shape, strict=True)), f"{tensor.name}: {shape}"
        assert set(shapes) <= {tensor.name for tensor in network._inputs}, "a profile names what is no input"
