"""Stage kinds: the words that may stand in a recipe's `stages`, and the validation of one entry.

A kind lies in its own room and is known here by an entry string alone, which is imported on use; other packages add
kinds by entry points of the group `compress.stages`. What stands below the word is the config class of the method it
names.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from compress.recipe.origin import Origin
from compress.recipe.problems import key_named_in, problems_of
from compress.recipe.yaml_source import Path
from runtime.config import plugins
from runtime.config.messages import did_you_mean, listing, show
from runtime.errors import RequestError

GROUP = "compress.stages"
Phase = Literal["model", "layers", "artifact"]

_ENTRIES = {
    "structure": "compress.prune.structure.stage:STAGE",
    "rotate": "compress.rotate.stage:STAGE",
    "permute": "compress.permute.stage:STAGE",
    "prune": "compress.weights.stage:PRUNE",
    "quantize": "compress.weights.stage:QUANTIZE",
    "recover": "compress.distill.recover.stage:STAGE",
    "kv_cache": "compress.kv_cache.stage:STAGE",
    "draft": "compress.distill.draft.stage:STAGE",
}


@dataclass(frozen=True)
class Stage:
    """One validated stage: `config` is an instance of the method's config class (or a policy), `index` its position in the recipe."""

    kind: str
    method: str
    config: Any
    index: int

    @property
    def path(self) -> Path:
        """Key path of the stage's settings in the recipe."""
        return ("stages", self.index, self.kind)

    @property
    def phase(self) -> Phase:
        """Phase of its kind."""
        return KINDS[self.kind].phase

    def resolved(self) -> dict[str, Any]:
        """The stage as plain data, every default filled in."""
        return {self.kind: KINDS[self.kind].resolved(self)}


class StageError(RequestError):
    """A stage of a recipe cannot be read. `problems` has one sentence for each wrong key, with file and line."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class StageKind:
    """One word that may stand as a stage, as far as reading a recipe needs it; `compress.model.stage.StageRoom` has the rest.

    Attributes:
        name: the word.
        summary: one line for `compress methods`.
        phase: "model" makes a new checkpoint of the one before it; "layers" compresses layers one by one on their way into the artifact;
            "artifact" works on the finished artifact. Kinds of other packages are of "model" or "artifact".
        once: why a recipe can have only one such stage, with `{first}` for the index of the first; "": it can have any number.
    """

    name: str
    summary: str
    phase: Phase = "model"
    once: str = ""

    def methods(self) -> Mapping[str, Any]:
        """Registry of its methods: {word after `method:`: an object with `config`, a pydantic class}."""
        raise NotImplementedError

    def parts(self) -> Mapping[str, Mapping[str, Any]]:
        """{field of its methods: registry of what that field names}."""
        return {}

    def validate(self, config: Any) -> None:
        """Raise `RequestError` where the fields of a valid config cannot be combined."""

    def changes(self, stage: Stage) -> bool:
        """Whether the model gives other outputs after the stage, so that training can recover something."""
        return self.phase != "artifact"

    def parse(self, fields: Any, index: int, origin: Origin) -> Stage:
        """Read what stands below the word; `StageError` where it is wrong."""
        path: Path = ("stages", index, self.name)
        methods = self.methods()
        if not isinstance(fields, dict):
            text = f"expected a mapping with a method, such as {{method: {next(iter(methods), '...')}}}, got {show(fields)}"
            raise StageError(origin.at(path, text))
        if "method" not in fields:
            raise StageError(origin.at(path, f"the key 'method' is missing; it is one of {listing(methods)}"))
        word = fields["method"]
        if not isinstance(word, str) or word not in methods:
            text = f"unknown method {show(word)}{did_you_mean(str(word), methods) or '.'} Allowed: {listing(methods)}"
            raise StageError(origin.at((*path, "method"), text))
        model = methods[word].config
        try:
            config = model.model_validate(fields, strict=True)
        except ValidationError as error:
            raise StageError(*problems_of(error, model, path, origin, given=fields)) from None
        try:
            self.validate(config)
        except RequestError as error:
            where = key_named_in(str(error), fields, path, origin)
            raise StageError(origin.at(where, str(error).removeprefix(f"{where[-1]}: "))) from None
        return Stage(self.name, word, config, index)

    def resolved(self, stage: Stage) -> dict[str, Any]:
        """What `parse` reads, with every default filled in."""
        return {"method": stage.method, **stage.config.model_dump(mode="json", exclude_none=True)}


class _Kinds(Mapping[str, Any]):
    """The kinds by their words; each is imported when it is asked for."""

    @functools.cached_property
    def _loaders(self) -> dict[str, Callable[[], Any]]:
        own = {name: functools.partial(pkgutil.resolve_name, entry) for name, entry in _ENTRIES.items()}
        return plugins.merge("stage", GROUP, own, plugins.entries(GROUP).items())

    def __getitem__(self, name: str) -> Any:
        return self._loaders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


KINDS: Mapping[str, Any] = _Kinds()
"""The stage kinds (`compress.model.stage.StageRoom`) by name: the built-in ones, then those of other packages."""


def parse_stage(entry: Any, index: int, origin: Origin) -> Stage:
    """Validate one entry of `stages`; `StageError` where it is wrong."""
    path: Path = ("stages", index)
    if not isinstance(entry, dict) or len(entry) != 1:
        found = show(entry) if not isinstance(entry, dict) or not entry else f"the keys {listing(map(str, entry))}"
        text = f"a stage is one key with its settings below, one of {listing(KINDS)}; got {found}"
        raise StageError(origin.at(path, text))
    ((name, fields),) = entry.items()
    if name not in KINDS:
        text = f"unknown stage{did_you_mean(name, KINDS) or '.'} Allowed: {listing(KINDS)}"
        raise StageError(origin.at((*path, name), text))
    kind: StageKind = KINDS[name]
    if kind.phase == "layers" and name not in _ENTRIES:
        text = (
            f"the stage kind of {type(kind).__module__} has the phase 'layers', which only prune and quantize have; a kind of another "
            "package has the phase 'model' or 'artifact', and a layer method is an entry point of compress.prune or compress.quantize"
        )
        raise StageError(origin.at((*path, name), text))
    return kind.parse(fields, index, origin)
