"""Registries of drafters, acceptance rules and length policies.

A new one is one file in its folder and one line here, or a class of another package under the entry-point group `compress.drafters`.
"""

from __future__ import annotations

from runtime.config.registry import Method, Registry

_HERE = "runtime.drafting.drafters"

#: All drafters; `Drafter.source` says what each drafts from.
DRAFTERS = Registry(
    "drafter",
    "compress.drafters",
    Method("lookup", f"{_HERE}.lookup:Lookup"),
    Method("copyspec", f"{_HERE}.lookup:CopySpec"),
    Method("suffix", f"{_HERE}.suffix:Suffix"),
    Method("trie", f"{_HERE}.trie:Trie"),
    Method("recycling", f"{_HERE}.token_recycling:TokenRecycling"),
    Method("hierarchy", f"{_HERE}.hierarchy:Hierarchy"),
    Method("adaptive-ngram", f"{_HERE}.adaptive_ngram:AdaptiveNgram"),
    Method("skip", f"{_HERE}.skip:Skip"),
    Method("early-exit", f"{_HERE}.early_exit:EarlyExit"),
    Method("nested", f"{_HERE}.cascade:Cascade"),
    Method("parallel", f"{_HERE}.model:Parallel"),
    Method("confident", f"{_HERE}.confident:Confident"),
    Method("chain", f"{_HERE}.model:ModelDrafter"),
    Method("dynamic-tree", f"{_HERE}.model_tree:DynamicTree"),
    Method("large-tree", f"{_HERE}.model_tree:LargeTree"),
    Method("staged", f"{_HERE}.staged_speculation:StagedSpeculation"),
    Method("medusa", f"{_HERE}.medusa:Medusa"),
    Method("mtp", f"{_HERE}.mtp:MTP"),
    Method("kangaroo", f"{_HERE}.kangaroo:Kangaroo"),
    Method("first", f"{_HERE}.composition:Fallback"),
    Method("merged", f"{_HERE}.composition:Merged"),
)
RULES = Registry(
    "acceptance",
    "",
    Method("exact", "runtime.drafting.verify.exact:Exact"),
    Method("typical", "runtime.drafting.verify.typical:Typical"),
    Method("rollback", "runtime.drafting.verify.rollback:Rollback"),
    Method("lenient", "runtime.drafting.verify.lenient:Lenient"),
)
LENGTHS = Registry(
    "lengths",
    "",
    Method("goodput", "runtime.drafting.lengths.goodput:Goodput"),
    Method("fixed", "runtime.drafting.lengths.fixed:Fixed"),
)


def drafters(*sources: str) -> list[Method]:
    """Drafters that draft from one of these: "text", "target", "model", "heads", "drafters"; none: all."""
    return [method for method in DRAFTERS if not sources or method.load().source in sources]


def find_drafter(name: object, *sources: str) -> Method | None:
    """A drafter of that name that drafts from one of these."""
    method = DRAFTERS.find(name)
    return method if method is not None and method.load().source in sources else None
