"""Export target: the interface, its options, and what it says before it writes."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator

from export.source import Source
from runtime.config.dtypes import dtype_name
from runtime.errors import RequestError
from runtime.formats.grid import GridScheme
from runtime.system.distribution import how_to_install
from runtime.system.progress import ProgressReporter

WORTH_SAYING = 100_000  # bytes


class Options(BaseModel):
    """Options that every target takes; a target's own are the fields of a subclass. The names are the command line's flags."""

    model_config = ConfigDict(extra="forbid")

    requantize: bool = False
    """Round weights anew where the target cannot hold their grid, and report the loss; without it such an artifact is refused."""

    @field_validator("dtype", mode="before", check_fields=False)
    @classmethod
    def _full_name(cls, written: Any) -> Any:
        """`fp16` and `bf16` too, where a target has a dtype."""
        return dtype_name(written)


@dataclass(frozen=True)
class Conversion:
    """Something that the target stores in another way than the artifact. Said before writing, and kept in `export.json`.

    Attributes:
        what: from what to what, in a sentence: "groups of 256 become groups of 128 with equal scales".
        modules: which modules (or tensors) it concerns.
        exact: True when no weight changes.
        bytes: how many bytes the export grows (or shrinks, negative) by it; None where unknown.
    """

    what: str
    modules: tuple[str, ...]
    exact: bool = True
    bytes: int | None = None

    def sentence(self) -> str:
        """One line for people."""
        where = self.modules[0] if len(self.modules) == 1 else f"{len(self.modules)} layers"
        parts = [where, "exact" if self.exact else "changes weights"]
        if self.bytes is not None and abs(self.bytes) >= WORTH_SAYING:
            parts.append(f"{abs(self.bytes) / 1e6:.1f} MB {'more' if self.bytes > 0 else 'less'}")
        return f"{self.what} ({'; '.join(parts)})"


def merged(changes: Iterable[Conversion]) -> list[Conversion]:
    """Conversions of one kind joined into one, in the order in which the kinds come."""
    kinds: dict[tuple[str, bool], list[Conversion]] = {}
    for change in changes:
        kinds.setdefault((change.what, change.exact), []).append(change)
    result = []
    for (what, exact), members in kinds.items():
        modules = tuple(name for member in members for name in member.modules)
        sizes = [member.bytes for member in members if member.bytes is not None]
        result.append(Conversion(what, modules, exact, sum(sizes) if sizes else None))
    return result


@dataclass
class Verification:
    """What loading the export back showed.

    Attributes:
        loader: what loaded it, with its version.
        checked: what was compared, in a sentence.
        metrics: `kl` (nats a token, mean), `top1_agreement`, `tokens`, `same_tokens`, `near_ties`, and whatever a target adds.
        notes: what could not be checked here and why; never empty when something was left out.
    """

    loader: str
    checked: str
    metrics: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, JSON-able."""
        return asdict(self)


@dataclass
class Job:
    """One export under way.

    Attributes:
        source: the artifact.
        options: of the target's `Options` class.
        folder: where to write; it exists, is empty, and is renamed to the output when everything has succeeded.
        progress: for phases, steps and warnings, which are kept in `export.json` too.
        losses: {module: relative error of the weight matrix, ||W' - W|| / ||W||}, filled by writers that round anew.
        facts: what the target wants in `export.json` under its own name (`runtime.load` reads it there).
        output: what `folder` will be called; for sentences.
    """

    source: Source
    options: Any
    folder: Path
    progress: ProgressReporter
    losses: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    output: Path = Path("BUNDLE")


class Target(ABC):
    """One engine or format that artifacts are exported to.

    Attributes:
        name: what `--target` is called with.
        summary: one line for `compress export --list`.
        extra: the extra of this package that installs `packages`; None when nothing more is needed.
        packages: modules that must be importable to write.
        options: class of its options.
        keeps_cache: what it writes is an artifact for `runtime.load`, whose KV-cache policy goes along.
        representations: names of the representations of weights that it can write.
        transforms_inputs: it can write layers that transform their inputs.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    extra: ClassVar[str | None] = None
    packages: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[type[Options]] = Options
    keeps_cache: ClassVar[bool] = False
    representations: ClassVar[frozenset[str]] = frozenset({GridScheme.name})
    transforms_inputs: ClassVar[bool] = False

    def open(self, path: str | Path, trust_remote_code: bool) -> Any:
        """What is exported: an artifact; a target may also take an export of its own that is to be finished (a build bundle)."""
        return Source(path, trust_remote_code)

    def reason_against(self, source: Any, options: Any) -> str | None:
        """Why this artifact cannot be written: what the target has no word for, or what `why_not` says; None when it can."""
        for module, entry in source.entries.items() if isinstance(source, Source) else ():
            weights = entry.scheme.weights
            if weights is not None and weights.name not in self.representations:
                return (
                    f"the weights of {module} are stored as representation {weights.name} ({weights.describe()}), and it writes "
                    f"only {' and '.join(sorted(self.representations))}"
                )
            if entry.scheme.transform is not None and not self.transforms_inputs:
                return f"{module} transforms its inputs (input_transform {entry.scheme.transform.name}), which it cannot express"
            if entry.scheme.activations is not None and entry.scheme.activations.prefix and not self.keeps_cache:
                return f"the static activation scale of {module} is good behind prefix tokens only, which it puts before no prompt"
        return self.why_not(source, options)

    @abstractmethod
    def why_not(self, source: Source, options: Any) -> str | None:
        """Why this artifact cannot be written with these options, in a clause that names module and property; None when it can.

        Looks at config, schemes and, where they decide, small tensors such as scales, so that `--list` is quick. What only all
        weights tell is a RequestError in `write`.
        """

    def conversions(self, source: Source, options: Any) -> list[Conversion]:
        """What will be stored in another way than in the artifact. Nothing is written yet."""
        return []

    def bytes_needed(self, source: Source, options: Any) -> int:
        """Bytes that `write` will put on the disk, roughly and rather too many."""
        return int(source.bytes * 1.2) + (8 << 20)

    @abstractmethod
    def write(self, job: Job) -> None:
        """Write everything but `export.json` and `README.md` into `job.folder`.

        Raises:
            RequestError: the weights turn out not to fit.
            CompressError: writing failed.
        """

    @abstractmethod
    def verify(self, job: Job) -> Verification:
        """Load `job.folder` back and compare it with the artifact (`export.verify` has the tools).

        Raises:
            CompressError: it does not compute what the artifact computes.
        """

    @abstractmethod
    def usage(self, job: Job, folder: str) -> list[str]:
        """Lines of code, three or so, that run the export in `folder`; `README.md` shows them."""

    def require_packages(self) -> None:
        """Raise RequestError, naming the extra, unless `packages` are installed."""
        missing = missing_packages(self.packages)
        if missing:
            raise RequestError(f"target {self.name} {needs(missing, self.extra)}")


def missing_packages(packages: Iterable[str]) -> list[str]:
    """Those of the modules that cannot be imported here (found without importing them)."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def needs(missing: list[str], extra: str | None) -> str:
    """`needs gguf, which is not installed: pip install 'gguf>=0.17'`."""
    how = how_to_install(extra) if extra else f"pip install {' '.join(missing)}"
    verb = "is" if len(missing) == 1 else "are"
    return f"needs {', '.join(missing)}, which {verb} not installed: {how}"
