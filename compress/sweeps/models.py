"""Sweep file as pydantic models: exactly its keys, strict, with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from compress.recipe.models import Name
from compress.recipe.problems import show
from compress.sweeps.metrics import METRICS
from compress.sweeps.space import Values
from runtime.config.messages import did_you_mean, listing


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

    @field_validator("startup", "population")
    @classmethod
    def _of_its_sampler(cls, value: int | None, info: ValidationInfo) -> int | None:
        owner, sampler = {"startup": "tpe", "population": "nsgaii"}[str(info.field_name)], info.data.get("sampler")
        if value is not None and sampler not in (owner, None):
            raise ValueError(f"only the sampler {owner} has this key, and sampler is {sampler}")
        return value


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


def _search(written: Any) -> Any:
    if written == "grid":
        return None
    if not isinstance(written, Mapping):
        forms = "grid, or a mapping with trials, such as {sampler: tpe, trials: 20, seed: 0}"
        raise ValueError(f"expected {forms}, got {show(written)}")
    return written


class SweepFile(Strict):
    """The top of the file. Values and bounds of metrics are read apart (`compress.sweeps.reading`).

    Attributes:
        name: names the sweep; the default output is `out/sweeps/NAME`.
        recipe: what is varied: a file (relative to this one, else to the working directory) or the name of a bundled recipe.
        model: replaces the recipe's model.
        set: other changes to the recipe, the same for all trials, by dotted keys.
        vary: values by dotted keys.
        search: see `SearchConfig`; None: a grid.
        objectives: names of metrics; the first is the vertical axis of plots.
        constraints: bounds of metrics: `{size: {max: 4MB}}`. Trials that violate one are on no front.
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
    search: Annotated[SearchConfig | None, BeforeValidator(_search)] = None
    objectives: list[str] = Field(default=["perplexity", "size"], min_length=1, max_length=4)
    constraints: dict[str, Any] = Field(default_factory=dict)
    keep: Literal["best", "pareto", "all", "none"] = "pareto"
    speed: SpeedConfig | None = None
    jobs: int = Field(default=1, ge=1, le=1024)
    ray: RayConfig | None = None
    output: str | None = Field(default=None, min_length=1)

    @field_validator("objectives")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for number, name in enumerate(names):
            if name not in METRICS:
                text = f"unknown metric '{name}'{did_you_mean(name, METRICS) or '.'} Allowed: {listing(METRICS)}"
                raise ValueError(text)
            if name in names[:number]:
                raise ValueError(f"'{name}' is given twice")
        return names


@dataclass(frozen=True)
class Constraint:
    """A bound of a metric: the largest (`max`) or the smallest (`min`) value that is allowed."""

    metric: str
    bound: Literal["min", "max"]
    limit: float

    def excess(self, value: float | None) -> float:
        """How far the value is beyond the bound, as a share of it; 0 or less: within. A missing value is beyond."""
        if value is None:
            return 1.0
        over = value - self.limit if self.bound == "max" else self.limit - value
        return over / abs(self.limit) if self.limit else over

    def describe(self) -> str:
        """`size at most 4.000 MB`."""
        return f"{self.metric} at {'most' if self.bound == 'max' else 'least'} {METRICS[self.metric].show(self.limit)}"


@dataclass(frozen=True)
class Sweep:
    """A validated sweep; see `SweepFile`. `speed` None: it is not measured."""

    file: SweepFile
    vary: dict[str, Values]
    constraints: list[Constraint] = field(default_factory=list)

    @property
    def speed(self) -> SpeedConfig | None:
        """As the file says it, else the defaults where a metric of speed is asked for."""
        names = (*self.file.objectives, *(constraint.metric for constraint in self.constraints))
        asked = any(METRICS[name].origin == "speed" for name in names)
        return SpeedConfig() if self.file.speed is None and asked else self.file.speed

    def resolved(self) -> dict[str, Any]:
        """The sweep with every default filled in, as plain data; `output` is left out."""
        file = self.file.model_copy(update={"speed": self.speed})
        data = file.model_dump(mode="json", exclude={"output"}, exclude_none=True)
        data = {**dict.fromkeys(SweepFile.model_fields), **data, "search": data.get("search", "grid")}
        data["vary"] = {key: values.plain() for key, values in self.vary.items()}
        limits: dict[str, dict[str, float]] = {}
        for constraint in self.constraints:
            limits.setdefault(constraint.metric, {})[constraint.bound] = constraint.limit
        data["constraints"] = limits
        return {key: value for key, value in data.items() if value is not None}

    def settled(self) -> dict[str, Any]:
        """The keys that a resume may not change: values and trials may be added, and trials may run elsewhere."""
        # recipe, model and set are compared as one
        others = ("description", "recipe", "model", "set", "vary", "jobs", "ray")
        data = {key: value for key, value in self.resolved().items() if key not in others}
        if isinstance(data["search"], dict):
            data["search"].pop("trials")
        return data
