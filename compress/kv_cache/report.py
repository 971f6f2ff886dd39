"""Report section on the compressed KV cache: its storage and its quality cost."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from compress.core.units import size
from compress.report.elements import note, section, table


def own_tokens(metrics: Mapping[str, Any]) -> str:
    """Explanation of token counts where the artifact's vocabulary is smaller than the source's."""
    return (
        f"cache figures are per token of the artifact, {metrics['tokens_each']:.3f} of which span one token of the source; "
        "weights and cache together are per token of the source"
    )


def cache_section(manifest: Mapping[str, Any]) -> str:
    """HTML: the policy of the KV cache and its bytes; empty without one."""
    if not manifest.get("kv_cache"):
        return ""
    from runtime.kv_cache.policy.policy import Policy

    policy = Policy.parse(manifest["kv_cache"])
    rows = [
        (f"{row['tokens']:,}", size(row["full_bytes"]), size(row["bytes"]), f"{row['bytes'] / max(row['full_bytes'], 1):.0%}")
        for row in manifest.get("kv_cache_bytes") or []
    ]  # fmt: skip
    content = f"<p>{escape(policy.describe())}</p>"
    content += table(("tokens of a sequence>", "plain cache>", "compressed, about>", "of it>"), rows)
    if policy.calibrated is not None and policy.needs:
        found = ", ".join(sorted(policy.needs)).replace("_", " ")
        content += note(f"Calibrated for this model: {found}.")
    return section("KV cache", content)


def cache_quality(metrics: Mapping[str, Any]) -> str:
    """The effect of the compressed cache on quality; empty without one."""
    facts = metrics.get("kv_cache") or {}
    content = ""
    if "perplexity_with_cache" in metrics:
        increase, overall = (f"{metrics[f'perplexity_increase_{name}']:+.2%}" for name in ("with_cache", "overall"))
        plain, compressed = f"{facts['plain_perplexity']:.5g}", f"{metrics['perplexity_with_cache']:.5g}"
        rows = [
            ("Perplexity of the tokens after a prompt", plain, compressed, increase),
            ("KL to a plain cache, nats per token", "", f"{facts['kl']:.5g}", ""),
            ("Same most likely token", "", f"{facts['top1_agreement']:.2%}", ""),
            ("Perplexity by weights and cache together", "", "", overall),
        ]
        content += "<p></p>" + table(("", "plain cache>", "compressed cache>", "change>"), rows)
        text = (
            f"Measured on {facts['tokens']:,} tokens after prompts of {facts['prompt_tokens']} in windows of "
            f"{facts['sequence_length']}; at their end a cache takes {size(facts['cache_bytes'])} instead of {size(facts['full_bytes'])}."
        )
        if "tokens_each" in metrics:
            text += f" {own_tokens(metrics).capitalize()}."
        content += note(text)
    if "warning" in facts:
        content += note(facts["warning"])
    return content
