"""Speed of finished trials: measured apart, one artifact at a time, while no trial runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compress.evaluate.speed import SpeedRequest, run_isolated
from compress.pipeline.files import write_json
from compress.sweeps.directory import read
from compress.sweeps.metrics import of_speed
from compress.sweeps.models import SpeedConfig
from compress.sweeps.records import Trial
from compress.sweeps.trial import finite
from runtime.errors import CompressError


def time_trial(trial: Trial, artifact: Path, config: SpeedConfig, device: str) -> None:
    """Measure the trial's artifact in a process of its own, and note in the trial what was found, or why nothing was."""
    try:
        trial.metrics |= measure(str(artifact), config, device)
        trial.speed_error = None
    except CompressError as error:
        trial.speed_error = str(error)


def measure(model: str, config: SpeedConfig, device: str) -> dict[str, float | None]:
    """Speeds of an artifact or a checkpoint, by the names of `METRICS`."""
    shape = (config.prompt_tokens, config.new_tokens, config.batch_size, config.repeat)
    options = {"device": device, "threads": config.threads, "kernels": config.kernels}
    return finite(of_speed(run_isolated(SpeedRequest(model, "runtime", *shape, options=options))))


def of_source(
    file: Path, model: Callable[[], Path], config: SpeedConfig, device: str, warn: Callable[[str], None]
) -> dict[str, float | None]:
    """Speeds of the model that is compressed, measured once; empty where they cannot be measured, which `warn` is told.

    Args:
        file: keeps what was found, or under `error` why nothing was.
    """
    if not file.is_file():
        try:
            write_json(file, measure(str(model()), config, device))
        except CompressError as error:
            write_json(file, {"error": str(error)})
            warn(f"the speed of the model itself was not measured: {error}")
    return {name: value for name, value in read(file).items() if name != "error"}
