"""Stages `prune` and `quantize`: methods that compress layers one by one, all in one pass over the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.units import size as count
from compress.model.stage import LayersJob, StageRoom, Store, TensorPlan
from compress.recipe.stages import Phase, Stage
from compress.recipe.targets import check_pattern
from runtime.errors import RequestError

if TYPE_CHECKING:
    from compress.core.memory_bounds import Bounds
    from compress.core.processes import Team
    from compress.core.progress import Reporter
    from compress.model.context import Context
    from compress.model.footprint import Footprint, Rows, Speed
    from compress.recipe import Recipe
    from compress.weights.footprint import WeightsFootprint
    from compress.weights.plan import WeightPlan


@dataclass(frozen=True)
class CheckedWeights(LayersJob):
    """The layers of all such stages, checked. `judged`: the footprint counts the evaluation of the artifact."""

    weights: WeightPlan
    judged: bool = True

    @property
    def context(self) -> Context:
        """Of the model whose layers they are."""
        return self.weights.context

    @property
    def needs(self) -> set[str]:
        """What calibration must collect."""
        return self.weights.needs

    @cached_property
    def _shapes(self) -> WeightsFootprint:
        from compress.weights.footprint import WeightsFootprint

        return WeightsFootprint(self.weights, self.judged)

    @property
    def widths(self) -> list[int]:
        """Inputs of the layers whose Hessian is collected, ascending."""
        return self._shapes.widths

    def footprint(self, context: Context, rows: Rows, bounds: Bounds, speed: Speed) -> Footprint:
        """Of the pass over the blocks, and of what follows until the artifact is judged."""
        return self._shapes.under(bounds, rows if self.needs else [], speed)

    def before(self) -> CheckedWeights:
        return replace(self, weights=self.weights.unsettled(), judged=False)

    @property
    def static_inputs(self) -> bool:
        return bool(self.weights.static_inputs)

    def check_prefix(self) -> None:
        from compress.weights.plan import check_prefix

        check_prefix(self.weights)

    def put_prefix(self, tokens: tuple[int, ...]) -> None:
        self.weights.put_prefix(tokens)

    def check_settled(self, stage: Stage) -> None:
        from compress.weights.plan import check_settled

        check_settled(self.weights, stage)

    def plan(self, context: Context) -> dict[str, Any]:
        """The budget, as long as it is not spent."""
        from compress.weights.artifact import candidate_bytes

        budget = self.weights.budget
        if budget is None:
            return {}
        tasks = [task for task in self.weights.tasks.values() if task.candidates]
        named = [scheme.weights.describe() for scheme in tasks[0].candidates if scheme.weights is not None]
        open_ = {"layers": len(tasks), "candidates": dict(zip(named, candidate_bytes(self.weights), strict=True))}
        return {"budget": {"key": budget.key, "amount": budget.amount, **open_}}

    def allocate(self, work: Path, spill: bool, reporter: Reporter) -> dict[str, Any]:
        from compress.weights.allocate import measure, settle

        found = measure(self.weights, work, reporter, spill)
        settle(self.weights, found)
        self.__dict__.pop("_shapes", None)
        return found

    def tensors(self) -> list[TensorPlan]:
        from compress.weights.artifact import tensors

        return tensors(self.weights)

    def foresee(self, directory: Path) -> None:
        from compress.weights.artifact import foresee

        foresee(self.weights, directory)

    def config(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        from compress.weights.artifact import config

        return config(self.weights, entries)

    def describe(self) -> str:
        """ "12 layers compressed"."""
        return f"{len(self.weights.tasks)} layers compressed"

    def warnings(self, context: Context, size: int) -> list[str]:
        """A shared tensor that is split, layers that calibration text does not reach, and layers that stay as they are."""
        from compress.weights.assign import left_alone, not_propagated, unreached

        found = [*unreached(context.streamed), *left_alone(self.weights.left)]
        if "drift" in self.needs:
            found += not_propagated(context.streamed, self.weights.tasks, context.calibration.tokens)
        counted = [
            task
            for task in self.weights.tasks.values()
            if task.scheme.weights is not None and task.scheme.weights.counted
        ]
        if counted:
            form = counted[0].scheme.weights
            assert form is not None
            found.append(
                f"the sizes of {len(counted)} tensors are estimates: that of {form.describe()} depends on the weights; compress.json "
                "will have the bytes"
            )
        if self.weights.untie:
            more = count(sum(tensor.bytes_after for tensor in self.tensors() if tensor.bytes_before == 0))
            split = f"the embedding and the head share one tensor; compressing one of them stores both ({more} more)"
            found.insert(0, split)
        return found

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Compress the blocks that are not done, all processes together; every part has a record of its own in the run directory.

        Returns:
            "peak_memory": the most that a process has taken until then, in bytes; "budget": see `compress.weights.allocate`.
        """
        from compress.weights.allocate import allocate
        from compress.weights.block_pass import BlockPass, first_block, run_pass
        from runtime.system.memory import peak_bytes

        directory, plan = store.directory, self.weights
        budget = allocate(plan, directory, reporter, store.spill)
        done = first_block(directory, len(context.streamed.blocks), context.streamed.runs)
        if directory.record("outside") is not None:
            return {"peak_memory": peak_bytes(), "budget": budget}
        store.ask(
            QUANTIZE.name,
            {
                "stages": [stage.index for stage in context.recipe.stages],
                "paths": [str(path.absolute()) for path in (context.path, context.original.path, directory.path)],
                "tasks": plan.tasks,
                "prefix": context.streamed.prefix,
                "constraints": plan.constraints,
                "done": done,
                "spill": store.spill,
                "bounds": context.bounds,
            },
        )
        run_pass(BlockPass(plan, directory, reporter, store.spill, done, store.team))
        peak = _highest_peak(store.team)
        store.team.done()
        return {"peak_memory": peak, "budget": budget}

    def manifest(self, context: Context, record: Mapping[str, Any]) -> dict[str, Any]:
        """What was chosen for each layer under a budget."""
        # It was spent before a recovery.
        budget = next((made["budget"] for made in (record, *context.records) if made.get("budget")), None)
        return {"budget": budget} if budget else {}


class WeightsRoom(StageRoom):
    """What both kinds share."""

    phase: Phase = "layers"

    def validate(self, config: Any) -> None:
        """Raise `RequestError` where there are no targets, or one does not compile."""
        for key in ("targets", "ignore"):
            for pattern in getattr(config, key):
                try:
                    check_pattern(pattern)
                except RequestError as error:
                    raise RequestError(f"{key}: {error}") from None
        if not config.targets:
            raise RequestError("targets: the list is empty; give a class name, a module name, a glob or re:EXPRESSION")

    def check(self, context: Context, stage: Stage) -> CheckedWeights:
        """All stages of `context.recipe` that compress layers; routed experts of `context` are apart."""
        from compress.weights.artifact import check_budget
        from compress.weights.plan import prepare

        weights = prepare(context)
        check_budget(weights)
        return CheckedWeights(stage, weights)

    def assist(self, recipe: Recipe, task: Mapping[str, Any], device: str, team: Team) -> None:
        """The share of another process in `CheckedWeights.run`."""
        from compress.core.progress import Reporter
        from compress.core.run_directory import RunDirectory
        from compress.model.context import Context
        from compress.model.float8_source import open_checkpoint
        from compress.weights.block_pass import BlockPass, run_pass
        from compress.weights.plan import WeightPlan

        checkpoint, original, output = map(Path, task["paths"])
        own = recipe.model_copy(update={"stages": [s for s in recipe.stages if s.index in task["stages"]]})
        context = Context.open(own, open_checkpoint(checkpoint), device, open_checkpoint(original), experts_apart=True)
        context.bind(task["bounds"])
        context.put_prefix(task["prefix"])
        plan = WeightPlan(
            context, task["tasks"], task["constraints"]
        )  # as the main process has checked and allocated it
        with Reporter(None, quiet=True) as reporter:
            run_pass(BlockPass(plan, RunDirectory(output), reporter, task["spill"], task["done"], team))
        _highest_peak(team)


class Prune(WeightsRoom):
    """The stage `prune`."""

    name = "prune"
    summary = "set weights to zero"

    def methods(self) -> Mapping[str, Any]:
        """See `compress.prune`."""
        from compress.prune import METHODS

        return METHODS


class Quantize(WeightsRoom):
    """The stage `quantize`."""

    name = "quantize"
    summary = "store weights, and optionally compute activations, in few bits"

    def methods(self) -> Mapping[str, Any]:
        """See `compress.quantize`."""
        from compress.quantize import METHODS

        return METHODS

    def parts(self) -> Mapping[str, Mapping[str, Any]]:
        """Input transforms."""
        from compress.quantize.transforms import METHODS

        return {"input_transform": METHODS}

    def validate(self, config: Any) -> None:
        """Raise `RequestError` where the fields make no scheme, too."""
        from compress.quantize import resolve_scheme

        super().validate(config)
        resolve_scheme(config, None)

    def report(self, manifest: Mapping[str, Any]) -> str:
        """What was chosen under a budget."""
        from compress.report.elements import note, section, table

        budget = manifest.get("budget")
        if not budget:
            return ""
        rows = [
            [
                (unit["layers"][0], "name"), str(len(unit["layers"])), unit["scheme"], (f"{unit['bits']:.3f}", "", unit["bits"]),
                (f"{unit['kl']:.2e}", "", unit["kl"]), f"{unit['kl'] / max(budget['kl'], 1e-30):.1%}",
            ]
            for unit in budget["units"]
        ]  # fmt: skip
        measured = (manifest.get("metrics") or {}).get("kl")
        text = f"{describe_budget(budget)}; predicted KL divergence {budget['kl']:.4g} nats per token"
        text += "" if measured is None else f", {measured:.4g} on held-out text"
        columns = ("first layer", "layers>", "scheme", "bits>", "predicted KL>", "of it>")
        why = "Layers in one line have one scheme: they read the same input, or are experts of one layer, and engines fuse them."
        return section("Budget", note(f"{text}. {why}") + table(columns, rows, sorts=True))


def describe_budget(budget: Mapping[str, Any]) -> str:
    """ "bits 3.5: 3.498 bits per weight"."""
    amount = count(budget["amount"]) if budget["key"] == "size" else f"{budget['amount']}"
    return f"{budget['key']} {amount}: {budget['bits']:.4g} bits per weight, {count(budget['bytes'])}"


def _highest_peak(team: Team) -> int:
    """Of all processes, which all call this."""
    from runtime.system.memory import peak_bytes

    own = peak_bytes()
    return max(team.broadcast(own, rank) for rank in range(team.size))


PRUNE, QUANTIZE = Prune(), Quantize()
