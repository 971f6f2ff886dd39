"""Names of drafters. A new one is one file in this folder and one line here."""

from __future__ import annotations

from runtime.kv_cache.methods import Method, Table

_HERE = "runtime.decoding.drafters"

#: Drafters that need nothing but the text.
FREE = Table(
    "drafter",
    Method("lookup", f"{_HERE}.lookup:Lookup"),
    Method("copyspec", f"{_HERE}.lookup:Lookup", {"longest": 3, "shortest": 3}),
    Method("suffix", f"{_HERE}.suffix:Suffix"),
    Method("trie", f"{_HERE}.trie:Trie"),
    Method("recycling", f"{_HERE}.recycling:Recycling"),
    Method("hierarchy", f"{_HERE}.hierarchy:Hierarchy"),
    Method("adaptive-ngram", f"{_HERE}.adaptive_ngram:AdaptiveNgram"),
)
#: Drafters that need a draft model: {"model": directory, "method": one of these}.
MODELS = Table(
    "drafter",
    Method("chain", f"{_HERE}.model:ModelDrafter"),
    Method("dynamic-tree", f"{_HERE}.model_tree:DynamicTree"),
    Method("large-tree", f"{_HERE}.model_tree:LargeTree"),
    Method("staged", f"{_HERE}.staged:Staged"),
    Method("parallel", f"{_HERE}.parallel:Parallel"),
    Method("confident", f"{_HERE}.confident:Confident"),
    Method("nested", f"{_HERE}.cascade:Cascade"),
)
#: What a draft model gives its drafter, or its drafter finds by itself.
GIVEN = ("lanes", "candidates", "weights", "mask_token", "most", "models", "asked", "head")
TABLES = (FREE, MODELS)


def names() -> list[str]:
    """All names, as messages list them."""
    return [name for table in TABLES for name in table.names]
