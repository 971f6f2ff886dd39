"""Entries of `compress methods`: methods of stages, parts of cache policies, and drafters, with their fields."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.config.field_types import describe_field, describe_type
from runtime.config.registry import Method, Registry
from runtime.config.settings import Setting, calibrations_of, settings_of


@dataclass(frozen=True)
class MethodEntry:
    """One line of the list.

    Attributes:
        source: a method of a stage, a preset of cache policies, or a method of a registry.
        written: how it is asked for, of drafters and of what a field of a stage names; None: `method: NAME`.
    """

    stage: str
    name: str
    source: Any
    written: str | None = None

    @property
    def summary(self) -> str:
        """The first sentence of its description."""
        if not isinstance(self.source, Method):
            return str(self.source.summary)
        text = _summary(self.source.load())
        return text if self.written is None else re.split(r"\. (?=[A-Z])", text)[0]

    def describe(self) -> dict[str, Any]:
        """Everything about it: description, paper, fields."""
        found = {"name": self.name, "stage": self.stage, "summary": self.summary}
        if self.written is not None:
            found["written"] = self.written
        if isinstance(self.source, Method):
            return found | _of_registry(self.source, self.stage, self.written is not None)
        if hasattr(self.source, "config"):
            return found | _of_stage(self.source)
        return found | (_of_part(self.source) if hasattr(self.source, "needs") else _of_preset(self.source))


@dataclass(frozen=True)
class MethodGroup:
    """Methods that stand in the same place.

    Attributes:
        name: the `stage` of its entries.
        summary: what all of them are for.
        written: how one of them is asked for.
        own: what says the fields that all have: the class of a policy, the names of a drafter's; None: the methods' config classes.
    """

    name: str
    summary: str
    written: str
    entries: list[MethodEntry]
    own: Any = None

    def describe(self) -> dict[str, Any]:
        """Everything about it: how it is written, methods, and the fields that all of them have."""
        return {
            "stage": self.name,
            "summary": self.summary,
            "written": self.written,
            "methods": [{"name": entry.name, "summary": entry.summary} for entry in self.entries],
            "fields": self._fields(),
        }

    def _fields(self) -> list[dict[str, Any]]:
        if self.own is not None:
            return [{"name": name, "type": "", "default": "", "description": text} for name, text in self.own.items()]
        if not self.entries or not hasattr(self.entries[0].source, "config"):
            return []
        described = [_of_stage(entry.source)["fields"] for entry in self.entries]
        common = set.intersection(*({field["name"] for field in fields} for fields in described))
        return [field for field in described[0] if field["name"] in common]


#: Of the parts of stages, of a policy and of a drafter, by the ends of their groups' names: what they are for, and how they are written.
_PARTS = {
    "input_transform": ("in which basis inputs and weights are rounded", "{method: ..., input_transform: NAME}"),
    "evict.score": ("which tokens stay", "{evict: {score: NAME, ...}}"),
    "evict.layers": ("how layers share the budget", "{evict: {layers: NAME, ...}}"),
    "evict.heads": ("how the heads of a layer share its budget", "{evict: {heads: NAME, ...}}"),
    "keys, values": ("how keys and values are stored", "{keys: NAME, values: NAME}"),
    "select": ("which tokens a step reads", "{select: {method: NAME, ...}}"),
    "acceptance": ("which proposed tokens become text", "{..., acceptance: {NAME: {}}}"),
    "lengths": ("how many tokens are proposed", "{..., lengths: {NAME: {}}}"),
}
_PHASES = ("model", "layers", "artifact")
_DRAFTER = {
    "depth": "most tokens of a branch.",
    "nodes": "most tokens of a tree.",
    "lengths": "how many tokens are proposed: `compress methods show 'drafter lengths'`.",
    "acceptance": "which of them become text: `compress methods show 'drafter acceptance'`.",
}


def method_groups() -> Iterator[MethodGroup]:
    """Everything that has a name, in the order of a recipe: methods of stages, what cache policies are made of, what drafts."""
    from compress.recipe.stages import KINDS
    from runtime.drafting.config.registry import LENGTHS, RULES, drafters
    from runtime.kv_cache.policy.policy import Policy
    from runtime.kv_cache.policy.presets import PRESETS
    from runtime.kv_cache.policy.registries import AXES

    for kind in sorted(KINDS.values(), key=lambda kind: _PHASES.index(kind.phase)):
        if kind.name != "kv_cache":
            entries = [MethodEntry(kind.name, method.name, method) for method in kind.methods().values()]
            yield MethodGroup(kind.name, kind.summary, f"{kind.name}: {{method: NAME, ...}}", entries)
            for key, methods in kind.parts().items():
                asked = f"{kind.name}: {_PARTS[key][1]}"
                named = [
                    MethodEntry(f"{kind.name} {key}", method.name, method, asked.replace("NAME", method.name))
                    for method in methods.values()
                ]
                yield _part(kind.name, key, named)
            continue
        entries = [MethodEntry(kind.name, preset.name, preset) for preset in PRESETS.values()]
        written = "kv_cache: NAME, or kv_cache: {method: NAME, ...}, or the keys below without a method"
        told = {"keys": "how keys are stored.", "values": "how values are stored."}
        told |= {name: text for name, text in _attributes(Policy).items() if name not in ("method", "calibrated")}
        yield MethodGroup(kind.name, kind.summary, written, entries, told)
        for key, registry in AXES.items():
            name = f"{kind.name} {key}"
            of_axis = [MethodEntry(name, method.name, method) for method in registry]
            yield _part(kind.name, key, of_axis)
    ways = {
        "text": "{{method: {}}}", "target": "{{method: {}}}", "model": "{{model: DIRECTORY, method: {}}}", "heads": "{{model: DIRECTORY}}",
        "drafters": "{{of: [DRAFTER, DRAFTER, ...], method: {}}}",
    }  # fmt: skip
    found = [
        MethodEntry("drafter", method.name, method, f"drafter: {way.format(method.name)}")
        for source, way in ways.items()
        for method in drafters(source)
    ]
    summary = "propose several tokens that the model verifies in one step: `runtime.load(drafter=...)`, `--drafter`"
    yield MethodGroup("drafter", summary, "drafter: NAME, or drafter: {method: NAME, ...}", found, _DRAFTER)
    for key, registry in (("acceptance", RULES), ("lengths", LENGTHS)):
        written = f"drafter: {_PARTS[key][1]}"
        parts = [
            MethodEntry(f"drafter {key}", each.name, each, written.replace("NAME", each.name)) for each in registry
        ]
        yield _part("drafter", key, parts)


def _part(whole: str, key: str, entries: list[MethodEntry]) -> MethodGroup:
    summary, written = _PARTS[key]
    return MethodGroup(f"{whole} {key}", summary, f"{whole}: {written}", entries)


def _of_stage(method: Any) -> dict[str, Any]:
    fields = {name: field for name, field in method.config.model_fields.items() if name != "method"}
    return {
        "description": inspect.getdoc(method.config) or method.summary,
        "paper": method.paper,
        "needs": sorted(method.needs),
        "fields": [
            {
                "name": name,
                "type": describe_field(field),
                "default": "required" if field.is_required() else _shown(field.get_default(call_default_factory=True)),
                "description": field.description or "",
            }
            for name, field in fields.items()
        ],
    }


def _of_part(method: Any) -> dict[str, Any]:
    """Of what a field of a stage names, which has no fields itself."""
    return {
        "description": inspect.getdoc(method.find) or method.summary,
        "paper": method.paper,
        "needs": sorted(method.needs),
        "fields": [],
    }


def _of_registry(method: Method, stage: str, drafts: bool) -> dict[str, Any]:
    cls = method.load()
    text = re.split(r"\n\s*(?:Attributes|Parts):", inspect.getdoc(cls) or stage)[0].strip()
    description, _, source = text.partition("\n\nSource: ")
    inline = re.search(r"\(([^()]*(?:arXiv|seed)[^()]*)\)", description)
    paper = re.split(r"(?<=\d)\.\s+(?=[A-Z])", source)[0] or (inline[1] if inline else "none")
    beside = "\n\nEvery drafter also takes depth, nodes, lengths and acceptance (docs/guides/draft.md)."
    return {
        "description": description + (beside if stage == "drafter" else ""),
        "paper": " ".join(paper.split()).rstrip(".") if drafts else paper,
        "needs": list(calibrations_of(cls)),
        "fields": _fields(cls, method.fixed),
    }


def _of_preset(preset: Any) -> dict[str, Any]:
    from runtime.kv_cache.policy.policy import Policy
    from runtime.kv_cache.policy.readers import settings_in
    from runtime.kv_cache.policy.registries import CODECS, HEAD_BUDGETS, LAYER_BUDGETS, SCORES, SELECTIONS

    policy = Policy.parse(preset.name)
    parts: list[tuple[str, Registry, Any]] = []
    if policy.evict is not None:
        evict = policy.evict
        parts += [("evict", SCORES, evict.score)]
        parts += [("evict.layers", LAYER_BUDGETS, evict.layers), ("evict.heads", HEAD_BUDGETS, evict.heads)]
    for tier in policy.tiers:
        parts += [("keys", CODECS, tier.keys), ("values", CODECS, tier.values)]
    parts += [("saliency", SCORES, policy.saliency), ("select", SELECTIONS, policy.select)]
    fields: dict[str, dict[str, Any]] = {}
    for key, registry, part in parts:
        if part is None:
            continue
        own = settings_in(registry, part)
        for entry in _fields(type(part), ()):
            if entry["name"] in own:
                name = f"{key}.{entry['name']}"
                fields.setdefault(name, entry | {"name": name, "default": _shown(own[entry["name"]])})
    written = ", ".join(f"{key}: {_shown(value)}" for key, value in preset.settings.items())
    description = f"{preset.summary[0].upper()}{preset.summary[1:]}.\n\nStands for {{{written}}}; keys beside `method` override it."
    return {
        "description": description,
        "paper": preset.paper,
        "needs": sorted(policy.needs),
        "fields": list(fields.values()),
    }


# ---------------------------------------------------------------- fields of a dataclass
def _fields(cls: Any, fixed: Iterable[str]) -> list[dict[str, Any]]:
    """Name, type, default and description of the settings of a method."""
    told = _attributes(cls)
    return [
        {
            "name": name,
            "type": _type(setting),
            "default": "required" if setting.default is dataclasses.MISSING else _shown(setting.default),
            "description": told.get(name, ""),
        }
        for name, setting in settings_of(cls, fixed).items()
    ]


def _type(setting: Setting) -> str:
    if setting.is_method:
        return "a score"
    # Some fields take more in Python than can be written.
    words = describe_type(setting.kind).split(" or another kind")[0].split(" or a list of integers")
    return words[0]


def _attributes(cls: Any) -> dict[str, str]:
    """{field: its description} from the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    names = "|".join(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else "-"
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        _, _, section = text.partition("Attributes:\n")
        # One a line, or the next after the full stop of the one before.
        for line in re.split(rf"\n(?=    \w[\w, ]*: )|(?<=\.)\s+(?=(?:{names}): )", section.split("\n\n")[0]):
            name, _, words = line.strip().partition(": ")
            for each in name.split(","):
                if words:
                    found[each.strip()] = " ".join(words.split())
    return found


def _summary(cls: Any) -> str:
    """The first paragraph of a docstring, without what it is from."""
    text = (inspect.getdoc(cls) or "").split("\n\n")[0].split("Parts:")[0].strip()
    return re.sub(r"\s*\([^()]*(?:arXiv|seed)[^()]*\)", "", " ".join(text.split())).rstrip(".")


def _shown(value: Any) -> str:
    """A value as a recipe has it, in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
