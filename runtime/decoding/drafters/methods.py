"""Names of drafters. A new one is one file in this folder and one line here."""

from __future__ import annotations

from runtime.kv_cache.methods import Method, Table

_HERE = "runtime.decoding.drafters"

#: Drafters that need nothing but the text.
FREE = Table(
    "drafter",
    Method("lookup", f"{_HERE}.lookup:Lookup"),
    Method("copyspec", f"{_HERE}.lookup:CopySpec", {"longest": 3, "shortest": 3}),
    Method("suffix", f"{_HERE}.suffix:Suffix"),
    Method("trie", f"{_HERE}.trie:Trie"),
    Method("recycling", f"{_HERE}.recycling:Recycling"),
    Method("hierarchy", f"{_HERE}.hierarchy:Hierarchy"),
    Method("adaptive-ngram", f"{_HERE}.adaptive_ngram:AdaptiveNgram"),
)
#: Drafters that need a draft model: {"model": directory, "method": one of these}. Those that end a branch in a way of their own have no
#: `confidence`.
MODELS = Table(
    "drafter",
    Method("chain", f"{_HERE}.model:ModelDrafter"),
    Method("dynamic-tree", f"{_HERE}.model_tree:DynamicTree", {"confidence": 0.0}),
    Method("large-tree", f"{_HERE}.model_tree:LargeTree", {"confidence": 0.0}),
    Method("staged", f"{_HERE}.staged:Staged"),
    Method("parallel", f"{_HERE}.parallel:Parallel"),
    Method("confident", f"{_HERE}.confident:Confident", {"confidence": 0.0}),
    Method("nested", f"{_HERE}.cascade:Cascade"),
)
#: Drafters that are a part of the target; each module has `build(target, settings)`.
SELF = Table(
    "drafter",
    Method("skip", f"{_HERE}.skip:Skip"),
    Method("early-exit", f"{_HERE}.early_exit:EarlyExit"),
)
#: Heads and adapters that a draft.json says are in its directory; each is built by a function of its own.
HEADS = Table(
    "drafter with a model",
    Method("medusa", f"{_HERE}.medusa:Medusa"),
    Method("mtp", f"{_HERE}.mtp:MTP"),
    Method("kangaroo", f"{_HERE}.kangaroo:Kangaroo"),
)
#: Drafters composed of others: {"of": [...], "method": one of these}.
COMPOSITIONS = Table(
    "way to compose drafters",
    Method("first", f"{_HERE}.first_of:FirstOf"),
    Method("merged", f"{_HERE}.first_of:Merged"),
)
#: What a draft.json has, and the method that goes with it.
OWN = {"depths": "nested", "parallel": "parallel", "accept_head": "confident"}
#: What a draft model gives its drafter, or its drafter finds by itself.
GIVEN = ("lanes", "candidates", "weights", "mask_token", "most", "models", "asked", "head")
#: What a directory of heads, and the target, give theirs.
GIVEN_HEADS = ("parts", "heads", "block", "head", "candidates", "start")
#: What a composition is made of.
GIVEN_COMPOSED = ("drafters",)
TABLES = (FREE, SELF, MODELS)


def names() -> list[str]:
    """All names, as messages list them."""
    return [name for table in TABLES for name in table.names]
