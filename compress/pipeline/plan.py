"""What a run would do, and whether it fits: every tensor, bytes before and after, memory, disk and time. Nothing is changed.

`apply` makes the same plan first and refuses a run that cannot fit, instead of being killed an hour in.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from compress.pipeline.arithmetic import has_bfloat16, products
from compress.pipeline.cache import cache_facts
from compress.pipeline.passes import Passes
from compress.pipeline.progress import memory_bytes
from compress.pipeline.session import Session
from compress.recipe.models import Recipe
from compress.solver import chunks
from runtime import formats

# Free space that is left alone on the disk, and the part of the free memory that a run may plan with.
DISK_MARGIN = 64 * 2**20
MEMORY_SHARE = 0.9
# Libraries keep workspaces (oneDNN, BLAS, allocator slack) beyond the tensors one can count; measured on CPU runs.
WORKSPACE = 96 * 2**20
# Hidden states larger than this share of the free memory live in files.
SPILL_SHARE = 0.2


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
    """See the module's docstring; `kv_cache` is as `cache_facts` gives it. `draft`: how one will be made, which is not in `seconds`.
    `passes`: what other stages make of the model first, in words.

    `problems` and `warnings` are sentences; a run with any of the problems is refused.
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
    kv_cache: dict[str, Any] | None = None
    draft: str | None = None
    passes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def headline(self) -> str:
        touched = [t for t in self.tensors if t.action == "compressed"]
        sizes = f"{size(self.bytes_before)} -> {size(self.bytes_after)}"
        return (
            (f"{'; '.join(self.passes)}; then " if self.passes else "")
            + f"{len(touched)} of {len(self.tensors)} tensors will be compressed, {sizes}; needs {size(self.peak_memory)} of memory and "
            f"{size(self.disk_needed)} of disk, about {duration(self.seconds)}"
            + (f", and what the draft takes ({self.draft})" if self.draft else "")
        )


def make_plan(recipe: Recipe, output: Path | None = None, device: str = "auto") -> Plan:
    """Plan a recipe. Reads headers, tokenizes the calibration text, and times one small matrix product; changes nothing."""
    from compress.pipeline.finish import evaluation_windows

    passes = Passes.open(recipe, device)  # holds what the session looks at
    session = passes.session
    return plan_session(
        session, evaluation_windows(session), Path(output) if output is not None else recipe.output_directory
    )


def plan_session(session: Session, evaluation: torch.Tensor | None, output: Path) -> Plan:
    """The plan of an opened session."""
    tensors = _tensors(session)
    before, after = sum(t.bytes_before for t in tensors), sum(t.bytes_after for t in tensors)
    rows = [tuple(ids.shape) for ids, _ in session.batches] if session.needs_data else []
    hidden = int(getattr(session.streamed.config.get_text_config(), "hidden_size", 0))
    itemsize = session.streamed.dtype.itemsize
    tokens = sum(math.prod(shape) for shape in rows)
    scored = int(evaluation.numel()) if evaluation is not None else 0
    # Two models' hidden states are compared position by position, so evaluation holds both.
    states = max(tokens, 2 * scored) * hidden * itemsize
    available = psutil.virtual_memory().available
    spill = states > SPILL_SHARE * available
    peak = memory_bytes() + WORKSPACE + _working_set(session, rows, evaluation) + (0 if spill else states)
    peak = max(peak, memory_bytes() + WORKSPACE + max((job.memory(session) for job in session.jobs), default=0))
    disk = after + tokens * hidden * itemsize * 2 + (2 * scored * hidden * itemsize if spill else 0) + DISK_MARGIN
    free = _free_disk(output)
    plan = Plan(
        model=str(session.original.path), output=str(output), tensors=tensors, bytes_before=before, bytes_after=after,
        peak_memory=peak, available_memory=memory_bytes() + available, disk_needed=disk, disk_free=free,
        calibration_tokens=session.calibration.tokens if session.reads_text else 0,
        seconds=_seconds(session, tokens, scored), spill=spill, kv_cache=cache_facts(session, session.cache_policy),
        draft=None if session.draft is None else session.draft.effort, passes=[job.describe() for job in session.jobs],
    )  # fmt: skip
    for tensor in tensors:
        if tensor.action == "compressed" and 0 < tensor.bytes_before <= tensor.bytes_after:
            sizes = f"{size(tensor.bytes_after)} instead of {size(tensor.bytes_before)}"
            plan.warnings.append(f"{tensor.name} will not get smaller: {tensor.method} stores {sizes}")
            break
    own = [t for t in tensors if t.format == "packed"]
    if own:
        more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
        plan.warnings.append(
            f"{own[0].name}{more} cannot be said in the compressed-tensors layout (a ragged group, or an embedding): the artifact "
            "loads with runtime.load(), and with transformers after `import runtime`, but not elsewhere"
        )
    if session.untie:
        added = sum(t.bytes_after for t in tensors if t.bytes_before == 0)
        plan.warnings.append(
            f"the embedding and the head share one tensor; compressing one of them stores both ({size(added)} more)"
        )
    plan.warnings += unused_limits(session)
    plan.warnings += [] if session.draft is None else session.draft.warnings
    plan.warnings += [warning for job in session.jobs for warning in job.warnings]
    if session.cache_policy is not None:
        plan.warnings += [f"kv_cache.{sentence}" for sentence in session.cache_policy.idle(session.streamed.config)]
    if plan.peak_memory > MEMORY_SHARE * plan.available_memory:
        plan.problems.append(
            f"the run needs about {size(plan.peak_memory)} of memory and may take "
            f"{size(MEMORY_SHARE * plan.available_memory)} of the {size(plan.available_memory)} that are free: {_advice(session, rows)}"
        )
    if plan.disk_needed > free:
        plan.problems.append(
            f"the run needs about {size(disk)} of disk for {output} and {size(free)} are free: free some, or name another --output"
        )
    return plan


def unused_limits(session: Session) -> list[str]:
    """A sentence for each limit of the recipe on something that this kind of model does not have."""
    if session.recipe.evaluate is None:
        return []
    encoder = session.streamed.kind == "encoder"
    return [
        f"evaluate.{name} is not checked: {'an encoder is' if encoder else 'only encoders are'} judged by min_cosine"
        for name in session.recipe.evaluate.limits()
        if (name == "min_cosine") != encoder
    ]


def _advice(session: Session, rows: list[tuple[int, ...]]) -> str:
    """What would make a run smaller: the batch, if it counts for anything, else only a larger machine."""
    batch, least = _working_set(session, rows, None), _working_set(session, [(1, shape[1]) for shape in rows], None)
    if batch - least > batch // 10:
        return "lower calibration.batch_size or sequence_length, or use a machine with more"
    return "its largest block and layer need that much; use a machine with more"


def _tensors(session: Session) -> list[TensorPlan]:
    checkpoint, dtype = session.checkpoint, session.streamed.dtype
    plans = []
    stored = {f"{name}.weight" for name in session.work}
    for name in checkpoint.names():
        size_before = checkpoint.nbytes(name)
        if name in session.streamed.checkpoint.dropped:
            plans.append(TensorPlan(name, "dropped", size_before, 0))
        elif name not in stored:
            plans.append(TensorPlan(name, "copied", size_before, size_before))
    if session.source is not None:
        before = session.reference.checkpoint
        for plan in plans:
            plan.bytes_before = before.nbytes(plan.name)
        gone = set(before.names()) - set(checkpoint.names())
        plans += [TensorPlan(name, "removed", before.nbytes(name), 0) for name in gone]
    for name, work in session.work.items():
        weight = f"{name}.weight"
        shape = tuple(int(n) for n in session.streamed.model.get_submodule(name).weight.shape)  # type: ignore[union-attr]
        density = 1.0 - work.share
        storage = formats.choose(work.scheme, (shape[0], shape[1]), density=density)
        size_after = storage.bytes_estimate(work.scheme, (shape[0], shape[1]), dtype, density)
        whole = session.reference.checkpoint
        size_before = whole.nbytes(weight) if checkpoint.has(weight) else 0
        plans.append(TensorPlan(weight, "compressed", size_before, size_after, work.describe(), storage.name))
    if session.untie:
        for tied, source in session.streamed.ties.items():
            if not checkpoint.has(tied) and tied.rpartition(".")[0] not in session.work and checkpoint.has(source):
                plans.append(TensorPlan(tied, "copied", 0, checkpoint.nbytes(source)))
    return sorted(plans, key=lambda plan: plan.name)


def _working_set(session: Session, rows: list[tuple[int, ...]], evaluation: torch.Tensor | None) -> int:
    """Bytes beyond what the process holds now: what is outside the blocks, the largest block, and the most one solve takes."""
    checkpoint, streamed = session.checkpoint, session.streamed
    outside = sum(checkpoint.nbytes(n) for n in streamed.outside_names())
    block = max(sum(checkpoint.nbytes(n) for n in streamed.block_names(i)) for i in range(len(streamed.blocks)))
    solve = 0
    config = streamed.config.get_text_config()
    widest = max(
        (int(m.in_features) for m in streamed.blocks[0].modules() if isinstance(m, torch.nn.Linear)), default=0
    )
    together: dict[tuple[str, int], int] = {}
    for name in session.work:
        weight = streamed.model.get_submodule(name).weight
        key = _reader(name), int(weight.shape[1])  # type: ignore[union-attr, index]
        together[key] = together.get(key, 0) + int(weight.numel())  # type: ignore[union-attr, operator]
    for name, work in session.work.items():
        weight = streamed.model.get_submodule(name).weight
        out, columns = int(weight.shape[0]), int(weight.shape[1])  # type: ignore[union-attr, index]
        hessians = 2 * 4 * columns * columns if "hessian" in work.needs else 0
        group = together[_reader(name), columns]
        pattern = work.prune.parsed if work.prune is not None else None
        # A chunk is held nine times over in float32 while it is solved; of all weights that share the input there are codes,
        # dequantized and packed weights, and float32 values with their masks where pruning chooses before rounding.
        apart = chunks.rows_are_independent(pattern, work.scheme.weights)
        chunk = min(group, chunks.rows_at_a_time(columns) * columns) if apart else out * columns
        stored = group * (1 + 2 * streamed.dtype.itemsize + (6 if pattern is not None else 0))
        solve = max(solve, hessians + 9 * 4 * chunk + stored)
    batch = max((math.prod(shape) for shape in rows), default=0)
    attention = max(
        (shape[0] * shape[1] * shape[1] * int(getattr(config, "num_attention_heads", 1)) * 4 for shape in rows),
        default=0,
    )
    # Products are widened to float32 where the CPU has no bfloat16: a copy of the weight at hand.
    wide = 0
    if streamed.device.type == "cpu" and streamed.dtype == torch.bfloat16 and not has_bfloat16():
        wide = 4 * max((int(p.numel()) for p in streamed.model.parameters() if p.dim() == 2), default=0)
    forward = wide + batch * widest * streamed.dtype.itemsize * 6 + min(attention, 2**30)
    logits = 0
    if evaluation is not None:
        from compress.pipeline.streamed_eval import LOGIT_ROWS

        logits = 6 * 4 * max(LOGIT_ROWS, int(evaluation.shape[1])) * session.vocabulary
    # Solving a block and judging the result happen one after the other.
    return outside + max(2 * block + solve + forward, 2 * outside + block + logits + wide)


def _reader(name: str) -> str:
    """Layers of one module and one width are taken to read the same input (q/k/v, gate/up), which is never too little."""
    return name.rpartition(".")[0]


def _seconds(session: Session, tokens: int, scored: int) -> float:
    """A guess from what this machine does in a small matrix product: forward passes, Hessians, column loops, start-up."""
    flops = _measured_flops(session.streamed.dtype)
    solver = _measured_flops(torch.float32)
    parameters = sum(
        math.prod(session.checkpoint.shape(n)) for n in session.checkpoint.names() if session.streamed.is_inside(n)
    )
    # Collecting stops early in three of four passes of a sequential block: little more than one full pass, and one to go on.
    total = 2.0 * parameters * (2.2 * tokens + 2 * scored) / flops
    for name, work in session.work.items():
        weight = session.streamed.model.get_submodule(name).weight
        out, columns = int(weight.shape[0]), int(weight.shape[1])  # type: ignore[union-attr, index]
        if "hessian" in work.needs:
            total += 1.0 * tokens * columns * columns / solver
            # The column loop, the error it leaves and what it is measured by; two more for a refinement pass; then the factor.
            count = 3 + 2 * int(getattr(work.quantize, "sweeps", 0) or 0)
            total += (count * out * columns * columns + columns**3 / 3) / solver
        total += out * columns * 8e-8
    return 2.0 + total


def _measured_flops(dtype: torch.dtype) -> float:
    """Floating-point operations a second of a 512 x 512 x 512 product, best of a few."""
    a, b = torch.randn(512, 512).to(dtype), torch.randn(512, 512).to(dtype)
    best = math.inf
    with products(a.device):
        for _ in range(5):
            start = time.perf_counter()
            torch.mm(a, b)
            best = min(best, time.perf_counter() - start)
    return 2 * 512**3 / best


def _free_disk(path: Path) -> int:
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return psutil.disk_usage(str(existing)).free


def size(count: float) -> str:
    """Bytes for people: 7.9 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """Seconds for people: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
