"""Plan of a run: every tensor, bytes before and after, memory, disk and time. Nothing is changed.

`apply` makes the same plan first and refuses a run that cannot fit, instead of being killed an hour in.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from compress.core.memory_bounds import MEMORY_SHARE, Bounds
from compress.core.units import duration, size
from compress.model.context import Context
from compress.recipe.models import Recipe
from compress.run.footprint import totals
from compress.run.session import Session
from compress.weights.plan import WeightPlan
from runtime import formats
from runtime.checkpoint.companions import left_behind
from runtime.modeling.layer_sizes import differing, is_ours
from runtime.modeling.linear_modules import get_matrix
from runtime.modeling.weights import first_name

#: Part of a limit by which what was counted may be more than it: the least that a refusal has named works in another process too, which is
#: not quite as large before it begins. What is counted errs high by more.
LEAST_MARGIN = 0.02


@dataclass
class TensorPlan:
    """One tensor of the source: what happens to it, by what, into which format; bytes are those on disk."""

    name: str
    action: str
    bytes_before: int
    bytes_after: int
    method: str = ""
    format: str = ""


@dataclass
class Plan:
    """What a run would do.

    Attributes:
        peak_memory, memory: bytes at the peak, and what they are made of: the process as it is, workspaces, hidden states, and each phase,
            of which the largest counts. device_memory: bytes of a GPU's; 0 on the CPU, and where nothing is known of it.
        bounds: what is done to need less, in words. max_memory: the user's limit.
        passes: what other stages make of the model first, in words.
        stages: what stages after compression say of themselves, each under a name of its own (`Job.plan`).
        problems, warnings: sentences; a run with any of the problems is refused.
    """

    model: str
    output: str
    tensors: list[TensorPlan]
    bytes_before: int
    bytes_after: int
    peak_memory: int
    available_memory: int
    disk_needed: int
    disk_free: int
    calibration_tokens: int
    seconds: float
    spill: bool
    memory: dict[str, int] = field(default_factory=dict)
    bounds: str = ""
    max_memory: int | None = None
    stages: dict[str, Any] = field(default_factory=dict)
    passes: list[str] = field(default_factory=list)
    device_memory: int = 0
    available_device_memory: int = 0
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def kv_cache(self) -> dict[str, Any] | None:
        """The cache policy, and the bytes of a sequence's cache."""
        return self.stages.get("kv_cache")

    @property
    def draft(self) -> str | None:
        """How a draft will be made; its time is not in `seconds`."""
        return self.stages.get("draft")

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as `plan --json` prints them; those of `stages` as fields of the plan."""
        found: dict[str, Any] = {}
        for name, value in asdict(self).items():
            found |= {"kv_cache": None, "draft": None, **value} if name == "stages" else {name: value}
        return found

    def headline(self) -> str:
        """One sentence: passes, number of compressed tensors, sizes, memory, disk and time."""
        touched = [t for t in self.tensors if t.action == "compressed"]
        sizes = f"{size(self.bytes_before)} -> {size(self.bytes_after)}"
        return (
            (f"{'; '.join(self.passes)}; then " if self.passes else "")
            + f"{len(touched)} of {len(self.tensors)} tensors will be compressed, {sizes}; needs {size(self.peak_memory)} of memory and "
            f"{size(self.disk_needed)} of disk, about {duration(self.seconds)}"
            + (f", and what the draft takes ({self.draft})" if self.draft else "")
            + (f"; {self.bounds}" if self.bounds else "")
        )


def make_plan(recipe: Recipe, output: Path | None = None, device: str = "auto", max_memory: int | None = None) -> Plan:
    """Plan a recipe. Reads headers, tokenizes the calibration text, and times one small matrix product; changes nothing.

    `max_memory`: bytes that the run may take.
    """
    session = Session.open(recipe, device)  # holds the checkpoints that the plan looks at
    return plan_session(session, Path(output) if output is not None else recipe.output_directory, max_memory)


def plan_session(session: Session, output: Path, max_memory: int | None = None, settled: Bounds | None = None) -> Plan:
    """The plan of an opened session, which keeps to the bounds that are chosen.

    Args:
        max_memory: bytes that the process may take; None: what is free.
        settled: as a run began that goes on.
    """
    context, weights = session.context, session.weights.weights
    tensors = _tensors(weights)
    before, after = sum(t.bytes_before for t in tensors), sum(t.bytes_after for t in tensors)
    free = _free_disk(output)
    takes = totals(session, after, max_memory, settled)
    context.bind(takes.bounds)
    plan = Plan(
        model=str(context.original.path), output=str(output), tensors=tensors, bytes_before=before, bytes_after=after,
        peak_memory=takes.memory, available_memory=takes.available_memory, disk_needed=takes.disk, disk_free=free,
        calibration_tokens=context.calibration.tokens if context.reads_text else 0,
        seconds=takes.seconds, spill=takes.bounds.spill, memory=takes.parts, bounds=takes.bounds.describe(),
        max_memory=max_memory, passes=[job.describe() for job in session.before],
        device_memory=takes.device, available_device_memory=takes.available_device,
        stages={name: value for job in session.after for name, value in job.plan(context).items()},
    )  # fmt: skip
    for tensor in tensors:
        if tensor.action == "compressed" and 0 < tensor.bytes_before <= tensor.bytes_after:
            sizes = f"{size(tensor.bytes_after)} instead of {size(tensor.bytes_before)}"
            plan.warnings.append(f"{tensor.name} will not get smaller: {tensor.method} stores {sizes}")
            break
    own = [t for t in tensors if t.format == "packed"]
    apart = is_ours(context.streamed.model)
    if apart:
        differ = " and ".join(sorted(differing(context.streamed.config)))
        plan.warnings.append(
            f"layers differ in {differ}: runtime.load() runs the result, and onnx, tensorrt and triton carry it; transformers cannot build "
            f"a {type(context.streamed.model).__name__} so yet"
        )
    if own:
        elsewhere = "" if apart else ", and with transformers after `import runtime`"
        plan.warnings.append(
            f"compressed-tensors cannot store {first_name([t.name for t in own])} (a ragged group, or an embedding): the "
            f"artifact loads with runtime.load(){elsewhere}, but not elsewhere"
        )
    if weights.untie:
        added = sum(t.bytes_after for t in tensors if t.bytes_before == 0)
        plan.warnings.append(
            f"the embedding and the head share one tensor; compressing one of them stores both ({size(added)} more)"
        )
    plan.warnings += unused_limits(context)
    for job in (session.weights, *session.before, *session.after):
        plan.warnings += [text for text in job.warnings(context, after) if text not in plan.warnings]
    source = context.original.path
    plan.warnings += [f"{source / name} stays behind: {why}" for name, why in left_behind(source).items()]
    for what, needed, available, advice in (
        ("memory", plan.peak_memory, plan.available_memory, takes.advice),
        (f"memory of {context.streamed.device}", plan.device_memory, plan.available_device_memory, takes.device_advice),
    ):
        if needed > MEMORY_SHARE * available:
            plan.problems.append(
                f"the run needs about {size(needed)} of {what} and may take {size(MEMORY_SHARE * available)} of the {size(available)} that "
                f"are free: {advice}"
            )
    if max_memory is not None and takes.least is not None and plan.peak_memory > max_memory * (1 + LEAST_MARGIN):
        least = -(-takes.least // 10**6)
        plan.problems.append(
            f"max_memory {max_memory / 1e6:.0f}MB is too little: this run needs at least {least}MB, of which the process takes "
            f"{takes.parts['process'] / 1e6:.0f}MB before it begins"
        )
    if plan.disk_needed > free:
        plan.problems.append(
            f"the run needs about {size(plan.disk_needed)} of disk for {output} and {size(free)} are free: free some, or name another "
            "--output"
        )
    return plan


def unused_limits(context: Context) -> list[str]:
    """A sentence for each limit of the recipe on something that this kind of model does not have."""
    if context.recipe.evaluate is None:
        return []
    encoder = context.streamed.kind == "encoder"
    return [
        f"evaluate.{name} is not checked: {'an encoder is' if encoder else 'only encoders are'} judged by min_cosine"
        for name in context.recipe.evaluate.limits()
        if (name == "min_cosine") != encoder
    ]


def _tensors(weights: WeightPlan) -> list[TensorPlan]:
    context = weights.context
    checkpoint, dtype = context.checkpoint, context.streamed.dtype
    whole = context.reference.checkpoint
    plans = []
    stored = {f"{name}.weight" for name in weights.tasks}
    for name in checkpoint.names():
        if name in checkpoint.dropped:
            plans.append(TensorPlan(name, "dropped", whole.nbytes(name), 0))
        elif name not in stored:
            plans.append(TensorPlan(name, "copied", whole.nbytes(name), checkpoint.nbytes(name)))
    if context.source is not None:
        gone = set(whole.names()) - set(checkpoint.names())
        plans += [TensorPlan(name, "removed", whole.nbytes(name), 0) for name in gone]
    for name, task in weights.tasks.items():
        weight = f"{name}.weight"
        rows, columns = get_matrix(context.streamed.model.get_submodule(name)).shape
        density = 1.0 - task.share
        storage = formats.choose(task.scheme, (rows, columns), density=density)
        size_after = storage.bytes_estimate(task.scheme, (rows, columns), dtype, density)
        size_before = whole.nbytes(weight) if checkpoint.has(weight) else 0
        plans.append(TensorPlan(weight, "compressed", size_before, size_after, task.describe(), storage.name))
    if weights.untie:
        for tied, source in context.streamed.ties.items():
            if not checkpoint.has(tied) and tied.rpartition(".")[0] not in weights.tasks and checkpoint.has(source):
                plans.append(TensorPlan(tied, "copied", 0, checkpoint.nbytes(source)))
    return sorted(plans, key=lambda plan: plan.name)


def _free_disk(path: Path) -> int:
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return psutil.disk_usage(str(existing)).free
