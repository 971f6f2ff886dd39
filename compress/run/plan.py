"""Plan of a run: every tensor, bytes before and after, memory, disk and time. Nothing is changed.

`apply` makes the same plan first and refuses a run that cannot fit, instead of being killed an hour in.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from compress.core.memory_bounds import MEMORY_SHARE, Bounds, choose, cut, ways
from compress.core.processes import on_this_machine
from compress.core.progress import Reporter, memory_bytes
from compress.core.units import duration, size
from compress.evaluate import texts
from compress.evaluate.limits import cutting, limits
from compress.model.context import Context
from compress.model.footprint import Footprint, Rows, Speed
from compress.model.stage import Job, Readers, TensorPlan
from compress.recipe.models import AUTO, Recipe
from compress.run.session import Session, layers_before
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.companions import left_behind
from runtime.config.messages import listing
from runtime.engines.blueprint import Blueprint
from runtime.engines.choose import describe_choice
from runtime.errors import RequestError
from runtime.kv_cache.policy.policy import Policy
from runtime.modeling.layer_sizes import differing, is_ours
from runtime.modeling.weights import first_name
from runtime.system.device import choose_device
from runtime.system.memory import available_bytes, free_bytes, return_memory

#: Part of a limit by which what was counted may be more than it: the least that a refusal has named works in another process too, which is
#: not quite as large before it begins. What is counted errs high by more.
LEAST_MARGIN = 0.02
#: Bytes of a checkpoint that a plan runs, which takes seconds; `apply` runs any.
SMALL = 2**30


@dataclass
class Plan:
    """What a run would do.

    Attributes:
        peak_memory, memory: bytes at the peak, and what they are made of: the process as it is, workspaces, hidden states, and each phase,
            of which the largest counts. device_memory: bytes of a GPU's; 0 on the CPU, and where nothing is known of it.
        bounds: what is done to need less, in words. max_memory: the user's limit.
        texts: description of calibration and evaluation text. limits: see `compress.evaluate.limits`.
        passes: what other stages make of the model first, in words.
        stages: what stages after compression say of themselves, each under a name of its own (`Job.plan`).
        readable_by: see `export.readers.readable_by`. engine: description of the engine that will run the artifact on this machine.
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
    texts: str = ""
    limits: dict[str, float] = field(default_factory=dict)
    stages: dict[str, Any] = field(default_factory=dict)
    passes: list[str] = field(default_factory=list)
    device_memory: int = 0
    available_device_memory: int = 0
    readable_by: list[dict[str, str]] = field(default_factory=list)
    engine: str = ""
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
            found |= {"budget": None, "kv_cache": None, "draft": None, **value} if name == "stages" else {name: value}
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


def make_plan(
    recipe: Recipe,
    output: Path | None = None,
    device: str = "auto",
    max_memory: int | None = None,
    readers: Readers | None = None,
    allocate: bool = False,
    quiet: bool = True,
) -> Plan:
    """Plan a recipe. Reads headers and text, times one small matrix product, and runs a model of at most `SMALL` bytes on some text, to see
    whether it reads such; changes nothing.

    `max_memory`: bytes that the run may take. `readers`: says who will be able to read the artifact. `allocate`: measure the model and
    choose what each layer gets under a budget, as the run will; `quiet`: without progress.

    Raises:
        RequestError: `allocate` where there is nothing to choose, or stages before make the model that would be measured.
    """
    session = Session.open(recipe, device)  # holds the checkpoints that the plan looks at
    output = Path(output) if output is not None else recipe.output_directory
    plan = plan_session(session, output, max_memory)
    if allocate and not plan.problems:
        chosen = _allocated(session, plan.spill, quiet)
        plan = plan_session(session, output, max_memory)
        plan.stages |= {"budget": chosen["budget"]} if "budget" in chosen else {}
    if session.context.original.total_bytes <= SMALL:
        plan.warnings += texts.doubt(session.context)
    if readers is not None:
        with tempfile.TemporaryDirectory(prefix="compress-plan-") as room:
            session.layers.foresee(Path(room) / "artifact")
            plan.readable_by = readers(Path(room) / "artifact", plan.stages)
            if not session.context.streamed.runs:
                return plan
            blueprint = Blueprint(Artifact(Path(room) / "artifact"), choose_device(device), "auto", None, False)
            policy = None if plan.kv_cache is None else Policy.parse(plan.kv_cache["policy"])
            plan.engine = describe_choice(blueprint, policy, plan.draft is not None)
    return plan


def _allocated(session: Session, spill: bool, quiet: bool) -> dict[str, Any]:
    """What a run would choose for layers first."""
    if session.before:
        before = session.before[0].stage
        text = f"plan measures the model as it is, which stage {before.index} ({before.kind}) changes first; leave out --allocate"
        raise RequestError(session.recipe.origin.at(before.path, text))
    with tempfile.TemporaryDirectory(prefix="compress-plan-") as room, Reporter(None, quiet) as reporter:
        found = session.layers.allocate(Path(room), spill, reporter)
    if not found:
        raise RequestError(
            "--allocate: no quantize stage has a budget (bits: 3.5, size or max_kl), and no prune stage an allocation other than uniform"
        )
    return found


def plan_session(session: Session, output: Path, max_memory: int | None = None, settled: Bounds | None = None) -> Plan:
    """The plan of an opened session, which keeps to the bounds that are chosen.

    Args:
        max_memory: bytes that the process may take; None: what is free.
        settled: as a run began that goes on.
    """
    context = session.context
    tensors = session.layers.tensors()
    before, after = sum(t.bytes_before for t in tensors), sum(t.bytes_after for t in tensors)
    existing = next(place for place in (output.absolute(), *output.absolute().parents) if place.exists())
    free = psutil.disk_usage(str(existing)).free
    takes = totals(session, after, max_memory, settled)
    context.bind(takes.bounds)
    plan = Plan(
        model=str(context.original.path), output=str(output), tensors=tensors, bytes_before=before, bytes_after=after,
        peak_memory=takes.memory, available_memory=takes.available_memory, disk_needed=takes.disk, disk_free=free,
        calibration_tokens=context.calibration.tokens if context.reads_text else 0,
        seconds=takes.seconds, spill=takes.bounds.spill, memory=takes.parts, bounds=takes.bounds.describe(),
        max_memory=max_memory, texts=texts.of_context(context), limits=limits(context.recipe, tensors, context.streamed.kind == "encoder"),
        passes=[job.describe() for job in session.before],
        device_memory=takes.device, available_device_memory=takes.available_device,
        stages={name: value for job in (session.layers, *session.after) for name, value in job.plan(context).items()},
    )  # fmt: skip
    for tensor in tensors:
        if tensor.action == "compressed" and 0 < tensor.bytes_before <= tensor.bytes_after:
            sizes = f"{size(tensor.bytes_after)} instead of {size(tensor.bytes_before)}"
            plan.warnings.append(f"{tensor.name} will not get smaller: {tensor.method} stores {sizes}")
            break
    plan.warnings += context.reader.warnings(context.recipe.calibration) if context.reads_text else []
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
    plan.warnings += [*texts.bundled(context), *texts.overlap(context), *unused_limits(context)]
    for job in (session.layers, *session.before, *session.after):
        plan.warnings += [text for text in job.warnings(context, after) if text not in plan.warnings]
    source = context.original.path
    plan.warnings += [f"{source / name} stays behind: {why}" for name, why in left_behind(source).items()]
    code = sorted(file.name for file in source.glob("*.py")) if not context.streamed.runs else []
    if code:
        text = "an artifact brings no code, so copy it from there for an engine that runs it"
        plan.warnings.append(f"{source}: {listing(code)} {'stays' if len(code) == 1 else 'stay'} behind: {text}")
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
    cuts, config = cutting(context.recipe), context.recipe.evaluate
    open_limits = [name for name in ("max_kl", "min_agreement") if getattr(config, name) == AUTO]
    found = []
    if cuts and open_limits and not encoder and not context.kept_tokens:
        text = f"after {' and '.join(cuts)} there is no default {' or '.join(open_limits)}, so none is checked; set a number to require one"
        found.append(config.at(open_limits[0], text))
    return found + [
        f"evaluate.{name} is not checked: {'an encoder is' if encoder else 'only encoders are'} judged by min_cosine"
        for name in context.recipe.evaluate.limits()
        if (name == "min_cosine") != encoder
    ]


# Footprint of the whole run: the peak memory of its stages, which run one after the other, and the time of all of them.

# Free space that is left alone on the disk.
DISK_MARGIN = 64 * 2**20
# Libraries keep workspaces (oneDNN, BLAS, allocator slack) beyond the tensors one can count; measured on CPU runs.
WORKSPACE = 96 * 2**20
# Hidden states larger than this share of the free memory live in files.
SPILL_SHARE = 0.2


@dataclass(frozen=True)
class Totals:
    """Of a run.

    Attributes:
        memory: bytes at its peak, of `available_memory`, what the process holds already counted in both; what would take less: `advice`.
        least: bytes at the peak where all is done that takes less; None: that was not asked for.
        parts: bytes by what they are for: the process as it is, workspaces, hidden states, and each phase of the run.
        device: bytes of a GPU's memory that stages take, of `available_device`; 0 where none does; `device_advice`.
        disk: bytes.
        seconds: about.
        bounds: what the run does to need less.
    """

    memory: int
    least: int | None
    available_memory: int
    parts: dict[str, int]
    advice: str
    device: int
    available_device: int
    device_advice: str
    disk: int
    seconds: float
    bounds: Bounds


def totals(session: Session, after: int, limit: int | None = None, settled: Bounds | None = None) -> Totals:
    """Of all stages of a session's run.

    Args:
        after: bytes of the artifact.
        limit: bytes that the process may take; None: what is free.
        settled: as a run began that goes on; its rows stay.
    """
    stages = _Stages(session)
    device = session.context.streamed.device
    on_cpu = device.type == "cpu"
    if limit is not None:  # what is dead does not count; imports have left it to nobody (`imports`)
        gc.collect()
        return_memory()
    free, held = free_bytes() // on_this_machine(), memory_bytes()
    room = free if on_cpu else min(free, available_bytes(device))
    rows = None if settled is None else settled.rows
    fewer = limit is not None and settled is None
    found = list(ways(session.layers.widths, stages.rows(), rows, fewer=fewer, filed=on_cpu))
    share = SPILL_SHARE * (room if limit is None else min(room, limit))
    if len(found) > 1 and max(one.states for one in stages.footprints(found[0])) > share:
        found = found[1:]

    def needed(bounds: Bounds) -> int:
        every = stages.footprints(bounds)
        # Hidden states are where blocks are; of the last stage, whose parts are small, nothing is said of a GPU.
        inside = every if on_cpu else [replace(one, states=0) for one in every[:-1]] + every[-1:]
        return held + WORKSPACE + max(one.memory + one.states for one in inside)

    bounds, memory = choose(found, needed, MEMORY_SHARE * (held + free) if limit is None else limit)
    every = stages.footprints(bounds)
    most = max(every, key=lambda one: one.memory + one.states)
    beside = max(every[:-1], key=lambda one: one.device + one.states, default=Footprint())
    device_needed = 0 if on_cpu or len(every) == 1 else beside.device + beside.states + WORKSPACE
    named = [one.parts or {job.stage.kind: one.memory} for job, one in zip(stages.jobs, every, strict=True)]
    parts = {"process": held, "workspace": WORKSPACE, "hidden states": most.states}
    for one in (named[-1], *named[:-1]):
        parts |= one
    return Totals(
        memory=memory,
        least=None if limit is None else min(map(needed, found)),
        available_memory=held + free,
        parts=parts,
        advice=most.advice,
        device=device_needed,
        available_device=0 if on_cpu else available_bytes(device),
        device_advice=beside.advice,
        disk=_disk(session, every, after, bounds.spill) + DISK_MARGIN,
        seconds=sum(one.seconds for one in every),
        bounds=bounds,
    )


class _Stages:
    """Footprints of the stages of a session under given bounds."""

    def __init__(self, session: Session) -> None:
        self.jobs = (*session.before, session.layers)
        self._context, self._recipe = session.context, session.recipe
        self._speed = Speed.measured(self._context.streamed)
        self._layers = session.layers.before()

    def rows(self) -> int:
        """Rows of the largest batch of calibration text; 0: nothing reads any."""
        if not self._layers.needs and not any(job.needs for job in self.jobs):
            return 0
        return max((ids.shape[0] for ids, _ in self._context.calibration.batches), default=0)

    def footprints(self, bounds: Bounds) -> list[Footprint]:
        """Of each job; hidden states that spill take no memory."""
        rows: Rows = []
        if self.rows():
            parts = (part for batch in self._context.calibration.batches for part, _ in cut(batch, bounds.rows))
            rows = [self._context.streamed.rows.positions(part) for part in parts]
        found = [self._footprint(job, rows, bounds) for job in self.jobs]
        return [replace(one, states=0) for one in found] if bounds.spill else found

    def _footprint(self, job: Job, rows: Rows, bounds: Bounds) -> Footprint:
        """Of a job, and of compressing the layers that it works on."""
        found = job.footprint(self._context, rows, bounds, self._speed)
        if job is self.jobs[-1]:
            return found
        found = replace(found, advice=self._recipe.origin.at(job.stage.path, found.advice))
        if layers_before(self._recipe, job.stage) is None:
            return found
        before = self._layers.footprint(self._context, rows, bounds, self._speed)
        # The artifact that they make is read by the job; it is no larger than the model, but for what cannot be packed.
        return found.after(replace(before, disk=before.disk + self._context.checkpoint.total_bytes, parts={}))


def _disk(session: Session, every: list[Footprint], after: int, spill: bool) -> int:
    """Every stage reads the checkpoint of the one before it and writes its own; the last one's stays until the artifact is complete."""
    models = [job.stored for job in session.before] + [session.context.checkpoint.total_bytes]
    *passes, last = every
    ends = [(models[number] if number else 0) + models[number + 1] + one.disk for number, one in enumerate(passes)]
    ends.append((models[-1] if passes else 0) + after + last.disk + (last.spilled if spill else 0))
    return max(ends)
