"""Published methods by name: each is a combination of the four axes, whose keys a policy may override."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.config.messages import plain


@dataclass(frozen=True)
class Preset:
    """One published method.

    Attributes:
        name: as policies say it.
        summary: one line.
        paper: where it comes from.
        settings: keys of a policy.
    """

    name: str
    summary: str
    paper: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def _int(bits: int) -> dict[str, Any]:
    return {"keys": f"int{bits}", "values": f"int{bits}"}


# Scores whose papers evict at every step do so every 32 here: up to 32 more tokens for a thirty-second of the sorting.
_STEPS = 32

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "streamingllm",
            "keeps the first 4 tokens, which attention sinks into, and the newest: constant memory",
            "StreamingLLM, arXiv 2309.17453",
            {"evict": {"score": "streaming", "tokens": 1024, "interval": _STEPS}},
        ),
        Preset(
            "h2o",
            "keeps the tokens that have gathered most attention, while decoding too",
            "H2O, arXiv 2306.14048",
            {"evict": {"score": "h2o", "ratio": 0.25, "interval": _STEPS}},
        ),
        Preset(
            "snapkv",
            "keeps what the last queries of the prompt look at, head by head",
            "SnapKV, arXiv 2404.14469",
            {"evict": {"score": "snapkv", "ratio": 0.25}},
        ),
        Preset(
            "tova",
            "keeps what the very last query looks at, all heads of a layer together",
            "TOVA, arXiv 2401.06104",
            {"evict": {"score": "tova", "ratio": 0.25, "interval": _STEPS}},
        ),
        Preset(
            "keyformer",
            "key tokens by attention under Gumbel noise and a rising temperature, and the newest",
            "Keyformer, arXiv 2403.09054",
            {"evict": {"score": "keyformer", "ratio": 0.25, "interval": _STEPS}},
        ),
        Preset(
            "defensivekv",
            "keeps what any observed query needed badly: worst case instead of mean, heads share a layer's budget",
            "DefensiveKV (Taming the Fragility of KV Cache Eviction in LLM Inference), arXiv 2510.13334",
            {"evict": {"score": "defensive", "heads": "adaptive", "ratio": 0.25}},
        ),
        Preset(
            "layer-defensivekv",
            "DefensiveKV with layers that compete for one budget",
            "DefensiveKV (Taming the Fragility of KV Cache Eviction in LLM Inference), arXiv 2510.13334",
            {"evict": {"score": "defensive", "layers": "defensive", "heads": "adaptive", "ratio": 0.25}},
        ),
        Preset(
            "pyramidkv",
            "SnapKV with much for the first layers and little for the last",
            "PyramidKV, arXiv 2406.02069",
            {"evict": {"score": "snapkv", "layers": "pyramid", "ratio": 0.25}},
        ),
        Preset(
            "cake",
            "keeps what the prompt's last queries look at, or look at unevenly; layers' slices by their attention, cut as the prompt goes",
            "CAKE, arXiv 2503.12491",
            {"evict": {"score": "cake", "layers": "cake", "ratio": 0.25}},
        ),
        Preset(
            "adakv",
            "SnapKV with the heads of a layer sharing one budget",
            "AdaKV, arXiv 2407.11550",
            {"evict": {"score": "snapkv", "heads": "adaptive", "ratio": 0.25}},
        ),
        Preset(
            "duoattention",
            "retrieval heads keep everything, streaming heads sinks and recent tokens; gates are learned by `compress apply`",
            "DuoAttention, arXiv 2410.10819",
            {"evict": {"score": "duo", "ratio": 1.0, "interval": 128}},
        ),
        Preset(
            "rpc",
            "prompts stay whole; every 1024 steps what was generated is cut to a quarter of it by what the newest queries look at",
            "Reasoning Path Compression, arXiv 2505.13866",
            {"evict": {"score": "rpc", "ratio": 0.25, "interval": 1024, "prompt": "keep"}},
        ),
        Preset(
            "kivi",
            "2 bits: keys on a grid a channel, values on grids a token, the newest tokens as floats",
            "KIVI, arXiv 2402.02750",
            _int(2),
        ),
        Preset(
            "zipcache",
            "salient tokens in 4 bits, the others in 2, by normalized attention",
            "ZipCache, arXiv 2405.14256",
            {"tiers": [{**_int(4), "share": 0.6}, {**_int(2), "share": 0.4}], "saliency": "normalized"},
        ),
        Preset(
            "mikv",
            "no token is evicted: important ones in 8 bits, the others in 2",
            "No Token Left Behind (MiKV)",
            {"tiers": [{**_int(8), "share": 0.25}, {**_int(2), "share": 0.75}], "saliency": "snapkv"},
        ),
        Preset(
            "mustafar",
            "each token's largest channels and a bit for each channel",
            "Mustafar, arXiv 2505.22913",
            {"keys": {"codec": "bitmap", "sparsity": 0.7}, "values": {"codec": "bitmap", "sparsity": 0.7}},
        ),
        Preset(
            "kvclustering",
            "similar keys of a chunk become one centroid, which answers for all of them",
            "Efficient Long-Context LLM Inference via KV Cache Clustering",
            {"clusters": {"ratio": 0.5, "chunk": 128}},
        ),
        Preset(
            "prefixquant",
            "4 bits, with the outlier tokens that `compress apply` finds put before every prompt and kept as floats",
            "PrefixQuant, arXiv 2410.05265",
            {**_int(4), "prefix": "calibrated"},
        ),
        Preset(
            "doublesparsity",
            "a step reads the tokens that a few calibrated channels of the keys point to",
            "Post-Training Sparse Attention with Double Sparsity",
            {"select": "double-sparsity"},
        ),
        Preset(
            "tidaldecode",
            "a few layers look at everything and pick the tokens that the layers after them read",
            "TidalDecode",
            {"select": "tidal"},
        ),
        Preset(
            "tokenselect",
            "heads vote for the tokens that a step reads; a choice is used again while queries stay alike",
            "TokenSelect",
            {"select": "token-select"},
        ),
        Preset(
            "recycled",
            "steps that read everything alternate with steps that read what those looked at most",
            "Recycled Attention",
            {"select": "recycled"},
        ),
        Preset(
            "quest",
            "a step reads the pages whose bounds promise the largest scores",
            "Quest, arXiv 2406.10774",
            {"select": "quest"},
        ),
    )
}
_WRITTEN = {plain(name): preset for name, preset in PRESETS.items()}


def find_preset(name: str) -> Preset | None:
    """By name; case, hyphens and underscores do not count."""
    return _WRITTEN.get(plain(name))
