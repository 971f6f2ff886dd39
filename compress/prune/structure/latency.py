"""Latency of pruned models, estimated before pruning.

Latency does not depend on the values of weights: checkpoints of zeros with few layers are written (sparse files), loaded as users would
load them, and timed. The latency of a whole model is extrapolated from the time that each layer adds. Some widths are timed; those in
between are interpolated linearly.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.core.files import write_json
from compress.core.version import VERSION
from compress.evaluate.speed import TEXT_TOKENS, token_time
from compress.model.checkpoint_writer import zeros
from compress.model.config_sizes import What, resized, size_of, with_layers
from compress.model.couplings import shapes
from runtime.errors import CompressError, RequestError
from runtime.system.directories import cache_directory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from compress.model.streamed import StreamedModel

WIDTHS = (0.75, 0.5, 0.25)
"""Shares of the units that are timed, beside all and the fewest."""
_log = logging.getLogger("compress")

# Machines have better and worse moments: everything is timed again in turn, but where that takes too long.
SWEEPS = 3
SECONDS = 20.0

Measure = Callable[[Sequence["PretrainedConfig"]], list[float]]


class Latency:
    """Seconds that one token takes of a model with a number of units: `latency(count)`, never falling with it.

    Args:
        streamed: the whole model.
        remove: what the units are.
        choices: numbers of units that may be asked for.
        measure: seconds of the models that configs describe; None: they are timed (`time_zeros`).
    """

    def __init__(self, streamed: StreamedModel, remove: What, choices: range, measure: Measure | None = None) -> None:
        self._config, self._remove = streamed.config, remove
        self._whole = size_of(streamed.config, remove).count
        self._depth = size_of(streamed.config, "layers").count
        self._depths = depths(streamed, self._depth)
        self._choices = choices
        self._measure = partial(time_zeros, streamed) if measure is None else measure
        self._about: dict[str, Any] = {
            "of": f"a text of {TEXT_TOKENS} tokens" if streamed.kind == "encoder" else "a decoded token",
            "device": streamed.device.type,
            "threads": torch.get_num_threads(),
        }
        self._points: list[tuple[int, float]] = []

    def __call__(self, count: int) -> float:
        if not self._points:
            self._points = self._timed()
        return _between(self._points, count)

    @property
    def of(self) -> str:
        """What takes the time: "a decoded token"."""
        return str(self._about["of"])

    def facts(self, kept: int) -> dict[str, Any]:
        """What was measured, JSON-able: "of" what, "device", "threads", "layers" of the models that were timed, "seconds" by number of
        units (of the whole model), "before" with all units and "after" with `kept`."""
        seconds = {str(count): self(count) for count, _ in self._points}
        layers = [count for count, _ in self._points] if self._remove == "layers" else list(self._depths)
        return {
            **self._about,
            "layers": layers,
            "seconds": seconds,
            "before": self(self._whole),
            "after": self(kept),
        }

    def _timed(self) -> list[tuple[int, float]]:
        """Numbers of units and their times, ascending and never falling: noise is evened out."""
        narrow = [self._config]
        if self._remove != "layers":
            narrow = [resized(self._config, self._remove, count) for count in self._widths()]
        deep = len(self._depths)
        times = self._measure([with_layers(config, list(range(depth))) for config in narrow for depth in self._depths])
        found = [rising(times[start : start + deep]) for start in range(0, len(times), deep)]
        if self._remove == "layers":
            return list(zip(self._depths, found[0], strict=True))
        whole = [_between(list(zip(self._depths, own, strict=True)), self._depth) for own in found]
        return list(zip(self._widths(), rising(whole), strict=True))

    def _widths(self) -> list[int]:
        near = {min(self._choices, key=lambda choice: abs(choice - share * self._whole)) for share in WIDTHS}
        return sorted({*near, self._choices[0], self._whole})


def depths(streamed: StreamedModel, depth: int) -> tuple[int, ...]:
    """Two numbers of layers that tell what any number takes, ascending: 1 and 3 where all layers are built alike.

    Where the first are built otherwise (dense ones before those with experts), or several kinds take turns, what lies between the two is
    made as what follows. A model that is built without any such order is timed with half its layers and with all; one with a single
    layer gives one number.
    """
    kinds = [shapes(block) for block in streamed.stacks[-1].blocks]
    near, period = next(
        (near, period)
        for near in range(1, len(kinds) + 1)
        for period in range(1, near + 1)
        if all(kinds[i] == kinds[i + period] for i in range(near - period, len(kinds) - period))
    )
    if near >= depth:
        near, period = max(1, depth // 2), depth
    far = min(near + max(period, 2), depth)
    return (near, far) if near < far else (depth,)


def rising(times: Sequence[float]) -> list[float]:
    """The sequence that never falls and is nearest by squares: neighbours that fall become their mean (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for seconds in times:
        pools.append((seconds, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (late, more), (early, some) = pools.pop(), pools.pop()
            pools.append(((early * some + late * more) / (some + more), some + more))
    return [mean for mean, number in pools for _ in range(number)]


def _between(points: Sequence[tuple[int, float]], count: int) -> float:
    """On the line between two points; before the first and after the last the line goes on."""
    if len(points) == 1:
        return points[0][1]
    place = next((i for i in range(1, len(points) - 1) if count <= points[i][0]), len(points) - 1)
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) / (right - left) * (count - left)


def time_zeros(streamed: StreamedModel, configs: Sequence[PretrainedConfig]) -> list[float]:
    """Seconds that models of zeros take. What was timed once on a machine is in the cache directory, so that `plan`, `apply` and `--resume`
    find the same.

    Args:
        streamed: a model that the configs are smaller ones of.
    """
    with tempfile.TemporaryDirectory(prefix="compress-latency-") as room:
        directories: dict[Path, Path] = {}
        records = []
        for number, config in enumerate(configs):
            directory = Path(room) / str(number)
            described, tensors = zeros(directory, streamed, config)
            records.append(cache_directory("latency") / f"{_key(described, tensors, streamed.device)}.json")
            directories[records[-1]] = directory
        known = {record: seconds for record in records if (seconds := _read(record)) is not None}
        found = _time(streamed, {record: path for record, path in directories.items() if record not in known})
    for record, seconds in found.items():
        _write(record, seconds)
    return [(known | found)[record] for record in records]


def _time(streamed: StreamedModel, directories: dict[Path, Path]) -> dict[Path, float]:
    found: dict[Path, float] = {}
    start = time.perf_counter()
    for _ in range(SWEEPS):
        for record, directory in directories.items():
            try:
                seconds = token_time(directory, streamed.device)
            except (CompressError, RuntimeError, ValueError) as error:
                kind = type(streamed.model).__name__
                raise RequestError(f"the time that a {kind} takes cannot be measured here: {error}") from error
            found[record] = min(seconds, found.get(record, seconds))
        if time.perf_counter() - start > SECONDS:
            break
    return found


def _key(config: dict[str, Any], tensors: dict[str, Any], device: torch.device) -> str:
    """What a time depends on: the model, and the machine."""
    import transformers

    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {torch.get_num_threads()}"
    machine = [platform.node(), platform.machine(), torch.backends.cpu.get_cpu_capability(), on]
    versions = [VERSION, torch.__version__, transformers.__version__]
    model = {name: [list(shape), str(dtype)] for name, (shape, dtype) in tensors.items()}
    return hashlib.sha256(json.dumps([machine, versions, config, model], sort_keys=True).encode()).hexdigest()


def _write(record: Path, seconds: float) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, {"seconds": seconds})
    except OSError as error:
        _log.warning("%s cannot be written (%s): times will be measured again", record, error)


def _read(record: Path) -> float | None:
    try:
        return float(json.loads(record.read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole
        return None
