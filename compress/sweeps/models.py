"""The sweep file as pydantic models: exactly its keys, strict, with defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from compress.recipe.models import Name
from compress.sweeps.metrics import METRICS
from compress.sweeps.space import Values

Scalar = int | float | str


class Strict(BaseModel):
    """A section of a sweep file."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SearchConfig(Strict):
    """A search by Optuna, in place of a grid.

    Attributes:
        sampler: `tpe` and `nsgaii` learn from the trials before, `random` does not.
        trials: how many, those that are refused or fail included.
        seed: with one job, the same seed proposes the same trials.
        startup: tpe: random trials before it learns; None: as Optuna has it (10).
        population: nsgaii: trials of a generation; None: as Optuna has it (50).
    """

    sampler: Literal["tpe", "random", "nsgaii"] = "tpe"
    trials: int = Field(ge=1, le=100_000)
    seed: int = Field(default=0, ge=0, lt=2**32)
    startup: int | None = Field(default=None, ge=1)
    population: int | None = Field(default=None, ge=2)


class SpeedConfig(Strict):
    """How speed is measured; the fields of `compress bench`.

    Attributes:
        threads: CPU threads; None: all, since nothing else runs then.
    """

    prompt_tokens: int = Field(default=128, ge=1)
    new_tokens: int = Field(default=64, ge=2)
    batch_size: int = Field(default=1, ge=1)
    repeat: int = Field(default=3, ge=1)
    threads: int | None = Field(default=None, ge=1)
    kernels: str = "auto"


class RayConfig(Strict):
    """Trials run on a Ray cluster.

    Attributes:
        address: of the cluster (`auto`: the one of this machine; ray://HOST:PORT); `local` starts one here.
        cpus, gpus: what a trial takes; cpus are its torch threads too.
        at_once: most trials at a time; None: as many as the cluster has room for.
    """

    address: str = Field(default="local", min_length=1)
    cpus: int = Field(default=1, ge=1)
    gpus: float = Field(default=0.0, ge=0.0)
    at_once: int | None = Field(default=None, ge=1)


class SweepFile(Strict):
    """The top of the file. Sections with forms of their own are read apart (`compress.sweeps.reading`).

    Attributes:
        name: names the sweep; the default output is `out/sweeps/NAME`.
        recipe: what is varied: a file (relative to this one, else to the working directory) or the name of a bundled recipe.
        model: replaces the recipe's model.
        set: other changes to the recipe, the same for all trials, by dotted keys.
        vary: values by dotted keys.
        search: `grid`, or see `SearchConfig`.
        objectives: names of metrics; the first is the quality that plots have upright.
        constraints: bounds of metrics: `{size: {max: 4MB}}`. What breaks one is on no front.
        keep: whose artifacts stay: `best` in the first objective, those on the `pareto` front, `all`, `none`.
        speed: see `SpeedConfig`; measured too where it is no objective.
        jobs: trials at a time, in processes here. ray: see `RayConfig`; in place of jobs.
        output: directory (relative to the working directory).
    """

    name: Name
    description: str = ""
    recipe: str = Field(min_length=1)
    model: str | None = Field(default=None, min_length=1)
    set: dict[str, Any] = Field(default_factory=dict)
    vary: dict[str, Any] = Field(min_length=1)
    search: Any = "grid"
    objectives: list[str] = Field(default=["perplexity", "size"], min_length=1, max_length=4)
    constraints: dict[str, Any] = Field(default_factory=dict)
    keep: Literal["best", "pareto", "all", "none"] = "pareto"
    speed: Any = None
    jobs: int = Field(default=1, ge=1, le=1024)
    ray: Any = None
    output: str | None = Field(default=None, min_length=1)


@dataclass(frozen=True)
class Constraint:
    """A bound of a metric: the largest (`max`) or the smallest (`min`) value that is allowed."""

    metric: str
    bound: Literal["min", "max"]
    limit: float

    def excess(self, value: float | None) -> float:
        """How far beyond the bound, as a share of it; 0 or less: it is kept. A value that is missing breaks it."""
        if value is None:
            return 1.0
        over = value - self.limit if self.bound == "max" else self.limit - value
        return over / abs(self.limit) if self.limit else over

    def describe(self) -> str:
        return f"{self.metric} at {'most' if self.bound == 'max' else 'least'} {METRICS[self.metric].show(self.limit)}"


@dataclass(frozen=True)
class Sweep:
    """A validated sweep; see `SweepFile`. `search` None is a grid; `speed` None: it is not measured."""

    file: SweepFile
    vary: dict[str, Values]
    search: SearchConfig | None = None
    constraints: list[Constraint] = field(default_factory=list)
    speed: SpeedConfig | None = None
    ray: RayConfig | None = None

    def resolved(self) -> dict[str, Any]:
        """The sweep with every default filled in, as plain data; `output` is left out."""
        data = self.file.model_dump(mode="json", exclude={"output"}, exclude_none=True)
        data["vary"] = {key: values.plain() for key, values in self.vary.items()}
        data["search"] = "grid" if self.search is None else self.search.model_dump(exclude_none=True)
        limits: dict[str, dict[str, float]] = {}
        for constraint in self.constraints:
            limits.setdefault(constraint.metric, {})[constraint.bound] = constraint.limit
        data["constraints"] = limits
        for key, section in (("speed", self.speed), ("ray", self.ray)):
            if section is not None:
                data[key] = section.model_dump(exclude_none=True)
        return data

    def settled(self) -> dict[str, Any]:
        """What a resume may not change; values and trials may be added, and where trials run is no matter."""
        data = self.resolved()
        for key in (
            "description",
            "recipe",
            "model",
            "set",
            "vary",
            "jobs",
            "ray",
        ):  # recipe, model and set are compared as one recipe
            data.pop(key, None)
        if isinstance(data["search"], dict):
            data["search"] = {key: value for key, value in data["search"].items() if key != "trials"}
        return data
