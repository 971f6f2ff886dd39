"""Listing of cache policies for `compress methods`: published methods, and their scores, budgets, codecs and selections."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from compress.commands.methods import fields_of, shown, summary_of
from runtime.config.fields import calibrated_fields
from runtime.config.registry import AXES, Method, Table
from runtime.kv_cache.policy.choices import Choice
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.policy.presets import PRESETS, Preset

STAGE = "kv_cache"


def listed() -> Iterator[dict[str, str]]:
    """Name, stage and summary of everything that a policy may name."""
    for preset in PRESETS.values():
        yield {"name": preset.name, "stage": STAGE, "summary": preset.summary}
    for key, table in AXES.items():
        for method in table:
            yield {"name": method.name, "stage": f"{STAGE} {key}", "summary": summary_of(method.load())}


def described(name: str) -> list[dict[str, Any]]:
    """Everything of that name in full: description, paper, fields."""
    found = [_preset(preset) for preset in PRESETS.values() if preset.name == name]
    for key, table in AXES.items():
        found += [_method(key, table, method) for method in table if method.name == name]
    return found


def _preset(preset: Preset) -> dict[str, Any]:
    policy = Policy.parse(preset.name)
    parts: list[tuple[str, Choice]] = []
    if policy.evict is not None:
        parts += [
            ("evict", policy.evict.score),
            ("evict.layers", policy.evict.layers),
            ("evict.heads", policy.evict.heads),
        ]
    for tier in policy.tiers:
        parts += [("keys", tier.keys), ("values", tier.values)]
    parts += [("saliency", policy.saliency)] if policy.saliency is not None else []
    parts += [("select", policy.select)] if policy.select is not None else []
    fields: list[dict[str, Any]] = []
    for key, part in parts:
        for entry in fields_of(part.cls, part.method.fixed):
            entry |= {"name": f"{key}.{entry['name']}", "default": shown(part.fields[entry["name"]])}
            fields += [entry] if entry["name"] not in {known["name"] for known in fields} else []
    written = ", ".join(f"{key}: {_inline(value)}" for key, value in preset.settings.items())
    return {
        "name": preset.name,
        "stage": STAGE,
        "summary": preset.summary,
        "description": f"{preset.summary[0].upper()}{preset.summary[1:]}.\n\nStands for {{{written}}}; keys beside `method` override it.",
        "paper": preset.paper,
        "needs": sorted(policy.needs),
        "fields": fields,
    }


def _method(key: str, table: Table, method: Method) -> dict[str, Any]:
    cls = method.load()
    text = inspect.getdoc(cls) or table.what
    description = re.split(r"\n\s*(?:Attributes|Parts):", text)[0].strip()
    source = re.search(r"\(([^()]*(?:arXiv|seed)[^()]*)\)", description)
    return {
        "name": method.name,
        "stage": f"{STAGE} {key}",
        "summary": summary_of(cls),
        "description": description,
        "paper": source[1] if source else "none",
        "needs": calibrated_fields(cls),
        "fields": fields_of(cls, method.fixed),
    }


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(part)}" for key, part in value.items()) + "}"
    return "[" + ", ".join(map(_inline, value)) + "]" if isinstance(value, list) else str(value)
