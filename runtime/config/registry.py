"""What may stand in a policy: names of scores, shares, codecs, selections and places, each a dataclass whose fields are the recipe's.

A new method is one file in its folder and one line here. Files are imported when their name is used, not before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Method:
    """One name of a table.

    Attributes:
        name: as policies say it.
        target: "module:Class", the module under `runtime.kv_cache` or with its full name.
        fixed: fields that the name itself gives ("int4": bits).
    """

    name: str
    target: str
    fixed: dict[str, Any] = field(default_factory=dict)

    def load(self) -> type:
        """The dataclass."""
        module, _, name = self.target.partition(":")
        whole = module if module.startswith("runtime.") else f"runtime.kv_cache.{module}"
        found: type = getattr(import_module(whole), name)
        return found


class Table:
    """The methods of one axis.

    Args:
        what: what messages call one of them.
        methods: of the axis.
    """

    def __init__(self, what: str, *methods: Method) -> None:
        self.what = what
        self._methods = {method.name: method for method in methods}
        self._written = {plain(name): method for name, method in self._methods.items()}

    def __iter__(self) -> Iterator[Method]:
        return iter(self._methods.values())

    @property
    def names(self) -> list[str]:
        return list(self._methods)

    def find(self, name: str) -> Method | None:
        """By name; case, hyphens and underscores do not count."""
        return self._written.get(plain(name))


def plain(name: str) -> str:
    """A name without what does not count in it: "Layer-DefensiveKV" is "layerdefensivekv"."""
    return re.sub(r"[-_\s]", "", name.lower())


SCORES = Table(
    "score",
    Method("streaming", "scores.streaming:Streaming"),
    Method("h2o", "scores.h2o:H2O"),
    Method("snapkv", "scores.snapkv:SnapKV"),
    Method("cake", "scores.cake:CakeIndicator"),
    Method("tova", "scores.tova:Tova"),
    Method("keyformer", "scores.keyformer:Keyformer"),
    Method("defensive", "scores.defensive:Defensive"),
    Method("normalized", "scores.zipcache:Normalized"),
    Method("duo", "scores.duo:Duo"),
    Method("rpc", "scores.rpc:ReasoningPath"),
)
LAYER_SHARES = Table(
    "share of layers",
    Method("uniform", "budgets.uniform:UniformLayers"),
    Method("pyramid", "budgets.pyramid:Pyramid"),
    Method("cake", "budgets.cake:Cake"),
    Method("defensive", "budgets.defensive:DefensiveLayers"),
)
HEAD_SHARES = Table(
    "share of heads",
    Method("equal", "budgets.uniform:EqualHeads"),
    Method("adaptive", "budgets.adaptive:AdaptiveHeads"),
)
CODECS = Table(
    "codec",
    Method("plain", "storage.plain:Plain"),
    Method("fp8", "storage.fp8:Float8"),
    Method("int8", "storage.integer:Integer", {"bits": 8}),
    Method("int4", "storage.integer:Integer", {"bits": 4}),
    Method("int2", "storage.integer:Integer", {"bits": 2}),
    Method("bitmap", "storage.bitmap:Bitmap"),
)
SELECTIONS = Table(
    "selection",
    Method("quest", "selection.quest:Quest"),
    Method("double-sparsity", "selection.double_sparsity:DoubleSparsity"),
    Method("token-select", "selection.token_select:TokenSelect"),
    Method("tidal", "selection.tidal:Tidal"),
    Method("recycled", "selection.recycled:Recycled"),
)

#: {key of a policy: its table}, for listings.
AXES: dict[str, Table] = {
    "evict.score": SCORES,
    "evict.layers": LAYER_SHARES,
    "evict.heads": HEAD_SHARES,
    "keys, values": CODECS,
    "select": SELECTIONS,
}

#: Fields that calibration fills; policies hold them under `calibrated`.
CALIBRATED = ("gates", "channels")
