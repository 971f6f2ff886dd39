"""Interface of stages: a room of stages (`StageRoom`), and one stage that has been checked against its model (`Job`).

Running a recipe (`compress.run`) speaks to stages through these alone. A room derives both classes; what it does not
need it inherits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.processes import Team
from compress.core.run_directory import RunDirectory
from compress.recipe.stages import KINDS, Stage, StageKind
from runtime.errors import RequestError

if TYPE_CHECKING:
    import torch

    from compress.core.memory_bounds import Bounds
    from compress.core.progress import Reporter
    from compress.model.context import Context
    from compress.model.footprint import Footprint, Rows, Speed
    from compress.recipe import Recipe
    from runtime.checkpoint.checkpoint import Checkpoint

Apply = Callable[[Mapping[str, Any], Path], None]
"""Runs a recipe, given as a dictionary, into a directory; on the CPU, quietly."""


Readers = Callable[[Path, Mapping[str, Any]], list[dict[str, str]]]
"""Function that returns the readers of an artifact, given its directory and manifest entries: `export.readers.readable_by`."""

WRITE = "compress"
"""Kind of the step that ends every run, and stands in no recipe (`LayersJob`)."""


@dataclass(frozen=True)
class Compressed:
    """A model whose layers stages before a job have compressed.

    Attributes:
        path: artifact without a manifest.
        layers: a line for each layer, as in a manifest's `layers`.
        entries: further ones of the manifest, of how they were compressed.
    """

    path: Path
    layers: Sequence[Mapping[str, Any]]
    entries: Mapping[str, Any]


@dataclass(frozen=True)
class Store:
    """Where a job writes, and with whom.

    Attributes:
        output: the checkpoint to be written (phase "model"), or the artifact.
        work: directory for what an interrupted call continues from.
        directory: of the run.
        apply: runs another recipe.
        spill: hidden states are in files.
        team: the processes of the run; this is the main one.
        compressed: the model that comes in with its layers compressed, for jobs of a room with `settles_layers`; None: none are.
    """

    output: Path
    work: Path
    directory: RunDirectory
    apply: Apply
    spill: bool = False
    team: Team = field(default_factory=Team)
    compressed: Compressed | None = None

    def ask(self, kind: str, task: Mapping[str, Any]) -> None:
        """Let every other process call `StageRoom.assist` of a kind with this task."""
        self.team.broadcast({"kind": kind, "task": dict(task)})


@dataclass(frozen=True)
class Job:
    """A stage that has been checked, with what is known of it before anything is computed.

    Attributes:
        stage: of the recipe.
    """

    stage: Stage

    # ------------------------------------------------------------ before the run
    @property
    def needs(self) -> set[str]:
        """What it collects from calibration text; empty: it reads none."""
        return set()

    @property
    def kept_tokens(self) -> torch.Tensor | None:
        """Token ids that stay, int64 `[vocabulary after]`; None: all (phase "model")."""
        return None

    @property
    def stored(self) -> int:
        """Bytes on the disk of the model that comes in (phase "model")."""
        return 0

    def outline(self, context: Context, directory: Path) -> Checkpoint:
        """A checkpoint of the shapes that the job will make; what comes after is checked against it (phase "model").

        Args:
            directory: new, for a checkpoint of zeros where shapes change.
        """
        return context.opened

    @property
    def begins_texts(self) -> bool:
        """Whether the artifact may put tokens of its own before every text (phase "artifact")."""
        return False

    def text_prefix(self, context: Context, store: Store, reporter: Reporter) -> tuple[int, ...]:
        """These tokens, found before layers are compressed, and noted for `run`, where `begins_texts`."""
        return ()

    def check_behind_prefix(self, context: Context) -> None:
        """RequestError where it cannot be beside static activations that are calibrated behind these tokens (phase "artifact")."""
        if self.computes:
            text = "static activations are good behind the prefix of the kv_cache stage only, which this stage puts before no text"
            raise RequestError(context.recipe.origin.at(self.stage.path, f"{text}; make the activations dynamic"))

    def footprint(self, context: Context, rows: Rows, bounds: Bounds, speed: Speed) -> Footprint:
        """Memory, disk and time that `run` takes.

        Args:
            context: of the run's last model. rows: shapes of the batches of calibration text. speed: of this machine.
        """
        from compress.model.footprint import Footprint

        return Footprint()

    def describe(self) -> str:
        """Summary for people: "ffn 1024 -> 768 channels by obs"."""
        return f"{self.stage.kind} by {self.stage.method}"

    def warnings(self, context: Context, size: int) -> list[str]:
        """Sentences for the user, before the run.

        Args:
            size: bytes of the artifact.
        """
        return []

    def plan(self, context: Context) -> dict[str, Any]:
        """What the plan says of it, JSON-able, by names of its own: `{"kv_cache": {...}}` (phase "artifact")."""
        return {}

    # ------------------------------------------------------------ the run
    @property
    def computes(self) -> bool:
        """Whether there is anything to run."""
        return True

    @property
    def title(self) -> str:
        """What the time of `run` is reported as: "structure"."""
        return self.stage.kind

    def is_current(self, record: Mapping[str, Any], store: Store) -> bool:
        """Whether what an earlier run has recorded is what this job would make."""
        return True

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Run the stage.

        Args:
            context: of the model that comes in; of phase "artifact": of the model that was compressed.

        Returns:
            The record, JSON-able: a resumed run finds it, and the manifest has it.
        """
        raise NotImplementedError

    def holds(self, store: Store) -> list[Path]:
        """Files and directories that `run` has written; their checksums are recorded with it."""
        return [] if self.stage.phase == "artifact" else [store.output]

    # ------------------------------------------------------------ phase "artifact"
    @property
    def evaluation_title(self) -> str:
        """What the time of `evaluate` is reported as."""
        return f"evaluate {self.stage.kind}"

    def evaluate(
        self,
        context: Context,
        store: Store,
        windows: torch.Tensor,
        record: Mapping[str, Any],
        metrics: dict[str, Any],
        reporter: Reporter,
    ) -> dict[str, Any]:
        """`metrics`, or a copy with what the stage changes of them.

        Args:
            windows: held-out ids `[n, s]`. record: of this job; empty where nothing was run.
        """
        return metrics

    def manifest(self, context: Context, record: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of the artifact's manifest."""
        return {self.stage.kind: record}


@dataclass
class TensorPlan:
    """One tensor of the source: what happens to it, by what, into which format; bytes are those on disk.

    Attributes:
        bits: per weight, without scales; None: not compressed. sparsity: requested fraction of zeros.
    """

    name: str
    action: str
    bytes_before: int
    bytes_after: int
    method: str = ""
    format: str = ""
    bits: float | None = None
    sparsity: float = 0.0


class LayersJob(Job):
    """All stages of phase "layers" as one job, which ends every run: layers are compressed, and the artifact's shards written.

    A run has it also where no layer is compressed: what nothing compresses is copied.
    """

    @property
    def context(self) -> Context:
        """Of the model whose layers they are."""
        raise NotImplementedError

    @property
    def widths(self) -> list[int]:
        """Inputs of the layers whose Hessian is collected, ascending."""
        raise NotImplementedError

    @property
    def static_inputs(self) -> bool:
        """Whether layers round their inputs to grids that are calibrated."""
        raise NotImplementedError

    def check_prefix(self) -> None:
        """RequestError where these grids cannot be calibrated behind prefix tokens."""
        raise NotImplementedError

    def put_prefix(self, tokens: tuple[int, ...]) -> None:
        """Calibrate these grids behind prefix tokens."""
        raise NotImplementedError

    def before(self) -> LayersJob:
        """The job as a stage that comes before the end has it run: no recovery has settled anything, and nothing is evaluated."""
        raise NotImplementedError

    def check_settled(self, stage: Stage) -> None:
        """RequestError where `stage`, which works on the compressed layers, cannot leave them as they are stored."""
        raise NotImplementedError

    def allocate(self, work: Path, spill: bool, reporter: Reporter) -> dict[str, Any]:
        """Settle now what `run` measures and settles first; what `plan` says of it; empty where there is nothing to settle.

        Args:
            work: directory for what spills.
        """
        raise NotImplementedError

    def tensors(self) -> list[TensorPlan]:
        """What becomes of every tensor of the source, by name."""
        raise NotImplementedError

    def foresee(self, directory: Path) -> None:
        """Write the artifact as it will be, of zeros that take no room on the disk, into a new directory."""
        raise NotImplementedError

    def config(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The artifact's config.json.

        Args:
            entries: {compressed module: how it is stored}, as the parts have recorded them.
        """
        raise NotImplementedError


class StageRoom(StageKind):
    """Everything about one kind of stage.

    Attributes:
        settles_layers: it works on layers that were compressed before it, and leaves them so (phase "model"); others cannot come after a
            stage of phase "layers".
        own_identity: a resumed run may have another such stage, or none; it alone is done again (phase "artifact").
    """

    settles_layers = False
    own_identity = False

    @property
    def record_key(self) -> str:
        """Key by which a record of this kind is known (phase "model"); its own name has the method as its value."""
        return self.name

    def check(self, context: Context, stage: Stage) -> Job:
        """Check a stage against its model, whose weights need not be there; of phase "layers" all such stages, as a `LayersJob`.

        Raises:
            RequestError: with file and line, where it cannot be carried out.
        """
        raise NotImplementedError

    def assist(self, recipe: Recipe, task: Mapping[str, Any], device: str, team: Team) -> None:
        """Take part in a job of the main process, as another one (`Store.ask`)."""
        raise NotImplementedError

    def forget(self, output: Path) -> None:
        """Remove from an unfinished artifact what a job of this kind has left (`own_identity`)."""

    def check_finished(self, job: Job | None, manifest: Mapping[str, Any], path: Path) -> None:
        """RequestError where a finished artifact is not as `job` (None: no such stage) would make it (`own_identity`)."""

    def report(self, manifest: Mapping[str, Any]) -> str:
        """Sections of the report (HTML) on what stages of this kind did; empty where there is nothing to show."""
        return ""

    def quality(self, metrics: Mapping[str, Any]) -> str:
        """What its effect adds to the report's section on quality (HTML); empty where there is nothing to show."""
        return ""

    def row(self, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
        """A record in a table: what was done, before, after, and a note (phase "model")."""
        raise NotImplementedError


def row_of(record: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A record of a manifest's `passes` as `StageRoom.row` has it; of a kind that is not installed here its name alone."""
    for name in KINDS:
        kind = KINDS[name]
        if kind.phase == "model" and kind.record_key in record:
            return kind.row(record)
    return next(iter(record), ""), "", "", ""
