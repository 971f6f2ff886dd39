"""Several artifacts side by side, as rows for a table and for `plot_tradeoff`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.report.facts import Facts, gather
from runtime.checkpoint.artifact import shown
from runtime.errors import RequestError


def comparison(artifacts: Sequence[str | Path]) -> list[dict[str, Any]]:
    """A row for each artifact, and one for the model they were all made from (`reference: True`) where that was measured.

    A row has `path`, `label` (the recipe's directory name), `method`, `bytes`, `bits_per_weight` of the compressed layers,
    `perplexity` (None when the recipe asked for no evaluation).

    Raises:
        ArtifactError: not an artifact. RequestError: the artifacts were measured on different text or come from different
            models, so that their numbers cannot be compared.
    """
    facts: list[Facts] = []
    for path in artifacts:
        with shown(Path(path)):
            facts.append(gather(path))
            _row(facts[-1])  # what it would be shown as
    _check_comparable(facts)
    rows: list[dict[str, Any]] = []
    first = next((fact for fact in facts if "after" in fact.metrics), None)
    if first is not None:
        rows.append(
            {
                "path": None, "label": "uncompressed", "method": "uncompressed", "bytes": first.bytes_before,
                "perplexity": first.metrics["before"]["perplexity"], "bits_per_weight": None, "reference": True,
            }
        )  # fmt: skip
    rows += [_row(fact) for fact in facts]
    return rows


def _row(fact: Facts) -> dict[str, Any]:
    methods = sorted({layer["method"] for layer in fact.layers})
    return {
        "path": str(fact.path), "label": fact.path.resolve().name, "method": ", ".join(methods) or "nothing compressed",
        "bytes": fact.bytes_after, "bits_per_weight": fact.layer_bits,
        "perplexity": fact.metrics["after"]["perplexity"] if "after" in fact.metrics else None,
    }  # fmt: skip


def _check_comparable(facts: list[Facts]) -> None:
    first = facts[0]
    for fact in facts[1:]:
        for what, one, other in (
            ("were made from different models", _fingerprint(first), _fingerprint(fact)),
            ("were evaluated on different text", _text(first), _text(fact)),
        ):
            if one is not None and other is not None and one != other:
                raise RequestError(f"{first.path} and {fact.path} {what}; their numbers cannot be compared")


def _fingerprint(fact: Facts) -> Any:
    return (fact.manifest.get("source") or {}).get("fingerprint")


def _text(fact: Facts) -> Any:
    """What the same model gives on the same text: a perplexity of the source that differs means another text."""
    if "before" not in fact.metrics:
        return None
    return fact.metrics["tokens"], fact.metrics["sequence_length"], round(fact.metrics["before"]["perplexity"], 4)
