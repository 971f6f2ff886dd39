"""Which policies `kv_quality.py` measures, and which presses of kvpress are the same methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kv_cells import Method

BUDGETS = (0.5, 0.25, 0.125, 0.0625)


def _int(bits: int, recent: int = 8, group: int = 32) -> dict[str, Any]:
    values = {"codec": f"int{bits}", "axis": "token", "group": group}
    return {"keys": f"int{bits}", "values": values, "recent": recent}


def _evict(score: str, **options: Any) -> dict[str, Any]:
    return {"evict": {"score": score, **options}}


def _select(method: str, **options: Any) -> dict[str, Any]:
    return {"select": {"method": method, "recent": 16, **options}}


def _duo(streaming: float) -> dict[str, Any]:
    return _evict("duo", ratio=1.0, streaming=streaming, sinks=4, recent=28, interval=32)


_CAKE16: dict[str, Any] = {"share": "cake", "observe": 16}
_HEADS16: dict[str, Any] = {"observe": 16, "heads": "adaptive"}
_W16: dict[str, Any] = {"observe": 16}
_LAYERS: dict[str, Any] = {"observe": 16, "layers": "defensive", "heads": "adaptive"}

#: Eviction alone, at the budget; with the presses that are kvpress's version of it.
EVICTIONS = tuple(
    replace(method, whole=True)
    for method in (
        Method("streamingllm", _evict("streaming"), ("streaming_llm",)),
        Method("snapkv w64", _evict("snapkv", observe=64), ("snapkv",)),
        Method("snapkv w16", _evict("snapkv", observe=16), ("snapkv_w16",)),
        Method("tova", _evict("tova"), ("tova",)),
        Method("h2o", _evict("h2o", recent=16)),
        Method("observed attention", _evict("h2o", recent=1, normalize=True), ("observed_attention",)),
        Method("keyformer", _evict("keyformer", recent=16)),
        Method("pyramidkv w16", _evict("snapkv", observe=16, layers="pyramid"), ("pyramidkv_w16",)),
        Method("adakv w16", _evict("snapkv", observe=16, heads="adaptive"), ("adakv_snapkv_w16",)),
        Method("cake w16", _evict("cake", observe=16, layers=_CAKE16)),
        Method("defensivekv w16", _evict("defensive", observe=16, heads="adaptive")),
        Method("layer-defensivekv w16", _evict("defensive", observe=16, layers="defensive", heads="adaptive")),
    )
)

#: Storage alone has one size.
STORAGES = (
    Method("fp8", {"keys": "fp8", "values": "fp8", "recent": 8}, fixed=True),
    Method("int8", _int(8), fixed=True),
    Method("kivi int4", _int(4), fixed=True),
    Method("kivi int2", _int(2), fixed=True),
    Method("zipcache", {"method": "zipcache", "recent": 8}, fixed=True),
    Method("mikv", {"method": "mikv", "recent": 8}, fixed=True),
    Method("mustafar", {"method": "mustafar", "recent": 8}, fixed=True),
    Method("kvclustering", {"method": "kvclustering", "recent": 8}, fixed=True),
    Method("duoattention", _duo(0.5), ("duo_attention_3_of_6",), fixed=True, needs=("gates",)),
    Method("duoattention, 5 of 6 stream", _duo(5 / 6), ("duo_attention_5_of_6",), fixed=True, needs=("gates",)),
    Method("duoattention + int4", {**_duo(0.5), **_int(4, 0)}, fixed=True, needs=("gates",)),
    Method("duoattention, 5 of 6 stream, + int4", {**_duo(5 / 6), **_int(4, 0)}, fixed=True, needs=("gates",)),
    Method(
        "duoattention, 5 of 6 stream, + int4 keys, int2 values",
        {**_duo(5 / 6), **_int(4, 0), "values": "int2"},
        fixed=True,
        needs=("gates",),
    ),
    Method("duoattention, 5 of 6 stream, + int2", {**_duo(5 / 6), **_int(2, 0)}, fixed=True, needs=("gates",)),
    Method("prefixquant", {**_int(4), "prefix": "calibrated"}, fixed=True, needs=("prefix_tokens",)),
    Method("kvclustering + int4", {**_int(4), "clusters": {"ratio": 0.5, "chunk": 128}}, fixed=True),
)

#: Eviction to what is left of the budget once what stays is stored in few bits; windows are longer, since tokens are cheap then,
#: and no token stays a float, whose page would be most of a small budget.
COMBINATIONS = tuple(
    Method(f"{name} + int{bits}", {**evict, **_int(bits, 0)})
    for bits in (4, 2)
    for name, evict in (
        ("streamingllm", _evict("streaming")),
        ("snapkv", _evict("snapkv", observe=64)),
        ("adakv", _evict("snapkv", observe=64, heads="adaptive")),
        ("defensivekv", _evict("defensive", observe=64, heads="adaptive")),
        ("layer-defensivekv", _evict("defensive", observe=64, layers="defensive", heads="adaptive")),
        ("layer-defensivekv w16", _evict("defensive", observe=16, layers="defensive", heads="adaptive")),
        ("defensivekv w16, cake layers", _evict("defensive", prior=0.1, layers=_CAKE16, **_HEADS16)),
    )
)

#: Eviction while a text is decoded, every 32 steps, to so many tokens; kvpress's decoding presses do so at the same steps.
DECODING = tuple(
    Method(f"{name}, decoding", {**_evict(score, interval=32, **options), **storage}, peers, decodes=True)
    for name, score, options, storage, peers in (
        ("streamingllm", "streaming", {}, {}, ("decoding_streaming_llm",)),
        ("snapkv w16", "snapkv", _W16, {}, ("decoding_snapkv_w16",)),
        ("adakv w16", "snapkv", {**_W16, "heads": "adaptive"}, {}, ("decoding_adakv_snapkv_w16",)),
        ("rpc w16", "rpc", {**_W16, "prompt": "keep"}, {}, ()),
        ("tova", "tova", {}, {}, ("decoding_tova",)),
        ("h2o", "h2o", {"recent": 16}, {}, ()),
        ("keyformer", "keyformer", {"recent": 16}, {}, ()),
        ("defensivekv w16", "defensive", {**_W16, "heads": "adaptive"}, {}, ()),
        ("layer-defensivekv w16", "defensive", _LAYERS, {}, ()),
        ("layer-defensivekv w16 + int4", "defensive", _LAYERS, _int(4, 0), ()),
    )
)

#: The cache kept, reads cut to the budget.
SELECTIONS = tuple(
    replace(method, reads=True)
    for method in (
        Method("quest", _select("quest", skip_layers=1)),
        Method("double sparsity", _select("double-sparsity", skip_layers=1), needs=("channels",)),
        Method("token-select", _select("token-select", skip_layers=1)),
        Method("tidal decode", _select("tidal", full_layers=1, select_layers=[1])),
        Method("recycled attention", _select("recycled", stride=16)),
    )
)

METHODS = (*EVICTIONS, *STORAGES, *COMBINATIONS, *DECODING, *SELECTIONS)
