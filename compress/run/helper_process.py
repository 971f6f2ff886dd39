"""What all processes but the main one do in a run that a launcher has started several of: their share of passes over blocks and recoveries.

Everything else is the main process's alone. Before each it says to all where the model is; when there are no more it says so, also
where the run failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from compress.core.processes import PartDone, Share, Team
from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.distill.recover.job import RecoverJob
from compress.distill.recover.stage import Recovery, recover
from compress.model.float8_source import open_checkpoint
from compress.recipe import Recipe
from compress.run.result import LimitError
from compress.run.session import Session, choose_device
from compress.weights.block_pass import BlockPass, first_block, run_pass
from runtime.errors import CompressError
from runtime.system.memory import peak_bytes


def compress_blocks(session: Session, directory: RunDirectory, reporter: Reporter, spill: bool, team: Team) -> int:
    """The main process: compress what is not done of a model's layers, all processes together.

    Returns:
        the most memory that one of them has taken until then, in bytes.
    """
    done = first_block(directory, len(session.streamed.blocks))
    if directory.record("outside") is not None:
        return peak_bytes()
    task = {
        "stages": [stage.index for stage in session.recipe.stages],
        "paths": [str(path.absolute()) for path in (session.checkpoint.path, session.original.path, directory.path)],
        "work": session.work,
        "held": session.held,
        "done": done,
        "spill": spill,
        "bounds": session.bounds,
    }
    team.agreed({"blocks": task})
    run_pass(BlockPass(session, directory, reporter, spill, done, Share(team)))
    peak = _highest_peak(team)
    team.done()
    return peak


def _highest_peak(team: Team) -> int:
    """Of all processes, which all call this."""
    own = peak_bytes()
    return max(team.told(own, rank) for rank in range(team.size))


def _assist_blocks(recipe: Recipe, task: dict[str, Any], device: str, team: Team) -> None:
    checkpoint, original, output = map(Path, task["paths"])
    stages = [stage for stage in recipe.stages if stage.index in task["stages"]]
    source = None if original == checkpoint else open_checkpoint(original)
    session = Session.open(recipe.model_copy(update={"stages": stages}), device, open_checkpoint(checkpoint), source)
    session.work, session.held = task["work"], task["held"]  # what stages before have settled, and what was allocated
    session.bind(task["bounds"])
    with Reporter(None, quiet=True) as reporter:
        run_pass(BlockPass(session, RunDirectory.shared(output), reporter, task["spill"], task["done"], Share(team)))
    _highest_peak(team)


def ask(recovery: Recovery) -> None:
    """The main process: let the others begin a recovery; it then calls `recover` with the same."""
    session = recovery.session
    paths = (session.checkpoint.path, session.original.path, recovery.before, recovery.output, recovery.work)
    task = {
        "stage": recovery.job.stage.index,
        "paths": [str(path.absolute()) for path in paths],
        "passes": list(recovery.passes),
        "tokens": recovery.tokens,
    }
    recovery.team.agreed({"recovery": task})


@contextmanager
def asking(team: Team, output: Path) -> Iterator[None]:
    """The main process: when this is left, all others are told that there is nothing more, and whether `output` is complete."""
    done: dict[str, Any] = {"complete": None}
    try:
        yield
        done["complete"] = str(output.absolute())
    except LimitError:
        done["complete"] = str(output.absolute())
        raise
    finally:
        team.agreed(done)
        team.meet()  # a process that is gone before the others have heard it would abort them


def assist(recipe: Recipe, device: str, team: Team) -> Path:
    """Any other process: take part until the main one says that there is nothing more; the artifact.

    Raises:
        CompressError: the run failed.
    """
    where = str(team.device(choose_device(device)))
    nothing: dict[str, Any] = {}
    while "complete" not in (asked := team.agreed(nothing)):
        if "blocks" in asked:
            _assist_blocks(recipe, asked["blocks"], where, team)
            continue
        task = asked["recovery"]
        checkpoint, original, before, output, work = map(Path, task["paths"])
        session = Session.plain(recipe, open_checkpoint(checkpoint), where, open_checkpoint(original))
        stage = next(stage for stage in recipe.stages if stage.index == task["stage"])
        job = RecoverJob.of(stage, session.streamed, session.reference)
        with Reporter(None, quiet=True) as reporter, suppress(PartDone):
            recover(Recovery(job, before, session, task["passes"], task["tokens"], output, work, reporter, team))
    team.meet()
    if asked["complete"] is None:
        raise CompressError("the run failed in the main process, which says why")
    return Path(asked["complete"])
