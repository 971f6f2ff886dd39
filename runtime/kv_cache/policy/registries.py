"""Registries of cache methods, one an axis: scores, budgets of layers and of heads, codecs, selections.

A new method is one file in its folder and one line here, or a class of another package under the entry-point group of its axis.
"""

from __future__ import annotations

from runtime.config.registry import Method, Registry
from runtime.config.settings import Calibration, Natural

_HERE = "runtime.kv_cache"
_BUDGETS = "compress.kv_budgets"

SCORES = Registry(
    "score",
    "compress.kv_scores",
    Method("streaming", f"{_HERE}.scores.streaming:Streaming"),
    Method("h2o", f"{_HERE}.scores.h2o:H2O"),
    Method("snapkv", f"{_HERE}.scores.snapkv:SnapKV"),
    Method("cake", f"{_HERE}.scores.cake:CakeIndicator"),
    Method("tova", f"{_HERE}.scores.tova:Tova"),
    Method("keyformer", f"{_HERE}.scores.keyformer:Keyformer"),
    Method("defensive", f"{_HERE}.scores.defensive:Defensive"),
    Method("normalized", f"{_HERE}.scores.zipcache:Normalized"),
    Method("duo", f"{_HERE}.scores.duo:Duo"),
    Method("rpc", f"{_HERE}.scores.rpc:ReasoningPath"),
)
LAYER_BUDGETS = Registry(
    "budget of layers",
    _BUDGETS,
    Method("uniform", f"{_HERE}.budgets.base:UniformLayers"),
    Method("pyramid", f"{_HERE}.budgets.pyramid:Pyramid"),
    Method("cake", f"{_HERE}.budgets.cake:Cake"),
    Method("defensive", f"{_HERE}.budgets.defensive:DefensiveLayers"),
    accepts=lambda budget: hasattr(budget, "shares"),
)
HEAD_BUDGETS = Registry(
    "budget of heads",
    _BUDGETS,
    Method("equal", f"{_HERE}.budgets.base:EqualHeads"),
    Method("adaptive", f"{_HERE}.budgets.adaptive:AdaptiveHeads"),
    accepts=lambda budget: hasattr(budget, "counts"),
)
CODECS = Registry(
    "codec",
    "compress.kv_storage",
    Method("plain", f"{_HERE}.storage.plain:Plain"),
    Method("fp8", f"{_HERE}.storage.fp8:Float8"),
    *(Method(f"int{bits}", f"{_HERE}.storage.integer:Integer", {"bits": bits}) for bits in (8, 4, 2)),
    Method("bitmap", f"{_HERE}.storage.bitmap:Bitmap"),
)
SELECTIONS = Registry(
    "selection",
    "compress.kv_selections",
    Method("quest", f"{_HERE}.selection.quest:Quest"),
    Method("double-sparsity", f"{_HERE}.selection.double_sparsity:DoubleSparsity"),
    Method("token-select", f"{_HERE}.selection.token_select:TokenSelect"),
    Method("tidal", f"{_HERE}.selection.tidal:Tidal"),
    Method("recycled", f"{_HERE}.selection.recycled_attention:RecycledAttention"),
)

#: {key of a policy: its registry}, for listings.
AXES: dict[str, Registry] = {
    "evict.score": SCORES,
    "evict.layers": LAYER_BUDGETS,
    "evict.heads": HEAD_BUDGETS,
    "keys, values": CODECS,
    "select": SELECTIONS,
}
#: What a policy itself may have calibrated: token ids that are put before every prompt.
PREFIX_TOKENS = Calibration("prefix_tokens", tuple[Natural, ...], False)
