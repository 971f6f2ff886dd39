"""Compress Hugging Face checkpoints once, offline: one recipe in, one self-describing artifact out.

`compress.apply(recipe)` runs a recipe, `compress.plan(recipe)` says what it would do; `runtime.load(path)` runs the result, and
`compress.draft(path, recipe)` gives it another draft. `compress.sweep(file)` tries many values of a recipe.
Heavy imports wait until a function is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.version import VERSION

if TYPE_CHECKING:
    from compress.recipe import Recipe
    from compress.run.plan import Plan
    from compress.run.run import AppliedArtifact
    from compress.sweeps.run import SweepResult

__version__ = VERSION

__all__ = ["__version__", "apply", "draft", "plan", "sweep"]


def apply(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    model: str | Path | None = None,
    output: str | Path | None = None,
    set: Iterable[str] | Mapping[str, Any] = (),
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    quiet: bool = False,
    max_memory: int | str | None = None,
) -> AppliedArtifact:
    """Compress a checkpoint as a recipe says.

    Args:
        recipe: a YAML file, the name of a bundled recipe, a dictionary with a recipe's keys, or a `compress.recipe.Recipe`.
        model: a checkpoint directory or hub id, instead of the recipe's.
        output: directory of the artifact, instead of the recipe's.
        set: overrides as on the command line, such as `"calibration.samples=64"`, or values by key: `{"calibration.samples": 64}`.
        resume: go on with an unfinished run in `output`.
        overwrite: replace what an earlier run wrote to `output`.
        device: where the work is done: `auto`, `cpu`, `cuda`, `cuda:1`.
        quiet: no progress on stderr.
        max_memory: what the process may take of the machine's memory, all in all, such as `"6GB"`; None: what is free.

    Returns:
        The artifact: `path`, `metrics`, `manifest`.

    Raises:
        runtime.errors.RequestError: the request is wrong; nothing was changed.
        runtime.errors.CompressError: the run failed, or its result exceeds a limit of `evaluate`.
    """
    from compress.recipe import load
    from compress.run import run
    from runtime.system.sizes import byte_count

    limit = None if max_memory is None else byte_count("max_memory", max_memory)
    loaded = load(recipe, model=model, output=output, set=set)
    return run.apply(loaded, resume=resume, overwrite=overwrite, device=device, quiet=quiet, max_memory=limit)


def draft(
    artifact: str | Path,
    recipe: str | Path | Mapping[str, Any] | Recipe,
    set: Iterable[str] | Mapping[str, Any] = (),
    device: str = "auto",
    quiet: bool = False,
) -> dict[str, Any] | None:
    """Make the draft of a finished artifact, or replace the one that it has; several processes may share the training.

    Args:
        artifact: its directory.
        recipe: as of `apply`; only its draft stage and its calibration text count.
        set: as of `apply`.
        device: as of `apply`.
        quiet: as of `apply`.

    Returns:
        What the manifest then says of the draft; None in all but the main process.

    Raises:
        runtime.errors.RequestError: the request is wrong; nothing was changed.
        runtime.errors.CompressError: it failed; the artifact is as it was, and the same call goes on.
    """
    from compress.recipe import load
    from compress.run.redraft import redraft

    return redraft(Path(artifact), load(recipe, set=set), device=device, quiet=quiet)


def plan(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    model: str | Path | None = None,
    output: str | Path | None = None,
    set: Iterable[str] | Mapping[str, Any] = (),
    max_memory: int | str | None = None,
) -> Plan:
    """What `apply` would do with the same arguments: tensors, sizes, memory, disk, time. Nothing is run or written."""
    from compress.recipe import load
    from compress.run.plan import make_plan
    from runtime.system.sizes import byte_count

    limit = None if max_memory is None else byte_count("max_memory", max_memory)
    return make_plan(load(recipe, model=model, output=output, set=set), max_memory=limit)


def sweep(
    sweep: str | Path | Mapping[str, Any],
    model: str | Path | None = None,
    output: str | Path | None = None,
    set: Iterable[str] | Mapping[str, Any] = (),
    jobs: int | None = None,
    resume: bool = False,
    retry: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    quiet: bool = False,
    max_memory: int | str | None = None,
) -> SweepResult:
    """Compress a checkpoint with many values of a recipe: a grid or a search, in processes here or on a Ray cluster.

    Args:
        sweep: a YAML file, the name of a bundled sweep, or a dictionary with a sweep's keys (docs/guides/sweep.md).
        model: a checkpoint directory or hub id, instead of the recipe's.
        output: directory of the sweep, instead of the file's.
        set: overrides of the recipe for all trials, such as `"calibration.samples=64"`.
        jobs: trials at a time, in processes of this machine.
        resume: go on with the sweep in `output`, or extend it by values or trials that were added.
        retry: with `resume`, try those trials again that failed or were refused.
        overwrite: replace what an earlier sweep wrote to `output`.
        device: as of `apply`.
        quiet: no progress on stderr.
        max_memory: what the trials that run at a time may take together; None: what is free. Each has its share.

    Returns:
        `path`, `trials` (values, metrics, whether on the Pareto front), and all of sweep.json as `summary`.

    Raises:
        runtime.errors.RequestError: the request is wrong; nothing was run.
        runtime.errors.CompressError: no trial has finished (`compress.sweeps.run.AllFailedError`, whose `result` has the reasons).
    """
    from compress.sweeps import run
    from runtime.system.sizes import byte_count

    limit = None if max_memory is None else byte_count("max_memory", max_memory)
    return run.sweep(
        sweep, model=model, output=output, set=set, jobs=jobs, resume=resume, retry=retry, overwrite=overwrite,
        device=device, quiet=quiet, max_memory=limit,
    )  # fmt: skip
