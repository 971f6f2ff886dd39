"""Compress Hugging Face checkpoints once, offline: one recipe in, one self-describing artifact out.

`compress.plan(recipe)` estimates a run, `compress.apply(recipe)` does it, `compress.draft(path, recipe)` gives the artifact a new
draft, and `compress.sweep(file)` tries many values of a recipe; `runtime.load(path)` runs the result. Heavy imports wait until a
function is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.shadowing import import_neighbours
from compress.core.version import VERSION

import_neighbours()  # before anything imports them

from runtime.system.aliases import ModuleAliases  # noqa: E402

if TYPE_CHECKING:
    from compress.recipe import Recipe
    from compress.run.plan import Plan
    from compress.run.run import AppliedArtifact
    from compress.sweeps.run import SweepResult

ModuleAliases({"compress.distill.team": "compress.core.processes"}).install()

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
    report_to: str | None = None,
) -> AppliedArtifact:
    """Compress a checkpoint with a recipe.

    Args:
        recipe: a YAML file, the name of a bundled recipe, a dictionary with a recipe's keys, or a `compress.recipe.Recipe`.
        model: a checkpoint directory or hub id, instead of the recipe's.
        output: directory of the artifact, instead of the recipe's.
        set: overrides as on the command line, such as `"calibration.samples=64"`, or values by key: `{"calibration.samples": 64}`.
        resume: continue an unfinished run in `output`.
        overwrite: replace the results of an earlier run in `output`.
        device: where to compute: `auto`, `cpu`, `cuda`, `cuda:1`.
        quiet: no progress on stderr.
        max_memory: memory limit of the whole process, in bytes or such as `"6GB"`; None: nine tenths of what is free.
        report_to: tracker that receives the run's numbers: wandb, mlflow, trackio.

    Returns:
        The artifact: `path`, `metrics`, `manifest`.

    Raises:
        runtime.errors.RequestError: the request is wrong; nothing was changed.
        runtime.errors.CompressError: the run failed, or its result exceeds a limit of `evaluate`.
    """
    from compress.recipe import load
    from compress.run import run
    from export.readers import readable_by
    from runtime.system.sizes import byte_count

    limit = None if max_memory is None else byte_count("max_memory", max_memory)
    loaded = load(recipe, model=model, output=output, set=set)
    return run.apply(
        loaded,
        resume=resume,
        overwrite=overwrite,
        device=device,
        quiet=quiet,
        max_memory=limit,
        readers=readable_by,
        report_to=report_to,
    )


def draft(
    artifact: str | Path,
    recipe: str | Path | Mapping[str, Any] | Recipe,
    set: Iterable[str] | Mapping[str, Any] = (),
    device: str = "auto",
    quiet: bool = False,
    report_to: str | None = None,
) -> dict[str, Any] | None:
    """Make or replace the draft of a finished artifact, for speculative decoding; processes of a launcher share the training.

    Args:
        artifact: its directory.
        recipe: as of `apply`; only its draft stage and calibration text are used.
        set: as of `apply`.
        device: as of `apply`.
        quiet: as of `apply`.
        report_to: as of `apply`.

    Returns:
        The manifest's entry of the draft; None in all processes but the first.

    Raises:
        runtime.errors.RequestError: the request is wrong; nothing was changed.
        runtime.errors.CompressError: it failed; the artifact is unchanged, and the same call continues.
    """
    from compress.recipe import load

    loaded = load(recipe, set=set)
    from compress.distill.draft.redraft import redraft
    from compress.run.run import apply_recipe

    return redraft(Path(artifact), loaded, apply_recipe, device, quiet, report_to)


def plan(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    model: str | Path | None = None,
    output: str | Path | None = None,
    set: Iterable[str] | Mapping[str, Any] = (),
    max_memory: int | str | None = None,
    allocate: bool = False,
) -> Plan:
    """Tensors, sizes, memory, disk and time of `apply` with the same arguments. Nothing is compressed or written.

    With `allocate` the model is measured, and the plan says what each layer gets under a budget (`plan.stages["budget"]`).
    """
    from compress.recipe import load
    from compress.run.plan import make_plan
    from export.readers import readable_by
    from runtime.system.sizes import byte_count

    limit = None if max_memory is None else byte_count("max_memory", max_memory)
    loaded = load(recipe, model=model, output=output, set=set)
    return make_plan(loaded, max_memory=limit, readers=readable_by, allocate=allocate)


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
    report_to: str | None = None,
) -> SweepResult:
    """Compress a checkpoint with many values of a recipe: a grid or a search, in local processes or on a Ray cluster.

    Args:
        sweep: a YAML file, the name of a bundled sweep, or a dictionary with a sweep's keys (docs/guides/sweep.md).
        model: a checkpoint directory or hub id, instead of the recipe's.
        output: directory of the sweep, instead of the file's.
        set: overrides of the recipe for all trials, such as `"calibration.samples=64"`.
        jobs: concurrent trials, each in a process of its own.
        resume: continue the sweep in `output`, or extend it by added values or trials.
        retry: with `resume`, repeat failed and refused trials.
        overwrite: replace an earlier sweep in `output`.
        device: as of `apply`.
        quiet: no progress on stderr.
        max_memory: memory limit of concurrent trials together; None: what is free.
        report_to: as of `apply`; one run of the tracker, a step a trial.

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
        device=device, quiet=quiet, max_memory=limit, report_to=report_to,
    )  # fmt: skip
