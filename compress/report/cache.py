"""Report section on the compressed KV cache: its storage and its quality cost."""

from __future__ import annotations

from html import escape
from typing import Any

from compress.core.units import size
from compress.report.elements import section, table
from compress.report.facts import Facts


def own_tokens(metrics: dict[str, Any]) -> str:
    """Explanation of token counts where the artifact's vocabulary is smaller than the source's."""
    return (
        f"cache figures are per token of the artifact, {metrics['tokens_each']:.3f} of which span one token of the source; "
        "weights and cache together are per token of the source"
    )


def cache_section(facts: Facts) -> str:
    """How keys and values are held while the model writes."""
    if not facts.manifest.get("kv_cache"):
        return ""
    from runtime.kv_cache.policy.policy import Policy

    policy = Policy.parse(facts.manifest["kv_cache"])
    rows = []
    for row in facts.manifest.get("kv_cache_bytes") or []:
        share = f"{row['bytes'] / max(row['full_bytes'], 1):.0%}"
        cells = (f"{row['tokens']:,}", size(row["full_bytes"]), size(row["bytes"]), share)
        rows.append([(text, "right") for text in cells])
    content = f"<p>{escape(policy.describe())}</p>"
    content += table(("tokens of a text>", "plain cache>", "compressed, about>", "of it>"), rows)
    if policy.calibrated is not None and policy.needs:
        found = ", ".join(sorted(policy.needs)).replace("_", " ")
        content += f'<p class="soft">Calibrated for this model: {escape(found)}.</p>'
    return section("Keys and values", content)


def cache_quality(metrics: dict[str, Any]) -> str:
    """What the compressed cache does to the quality; empty without one."""
    facts = metrics.get("kv_cache") or {}
    content = ""
    if "perplexity_with_cache" in metrics:
        rows = [
            [
                ("Perplexity of what follows a prompt", ""), (f"{facts['plain_perplexity']:.5g}", "right"),
                (f"{metrics['perplexity_with_cache']:.5g}", "right"), (f"{metrics['perplexity_increase_with_cache']:+.2%}", "right"),
            ],
            [("KL to a plain cache, nats a token", ""), ("", ""), (f"{facts['kl']:.5g}", "right"), ("", "")],
            [("Same most likely token", ""), ("", ""), (f"{facts['top1_agreement']:.2%}", "right"), ("", "")],
            [
                ("Perplexity by weights and cache together", ""), ("", ""), ("", ""),
                (f"{metrics['perplexity_increase_overall']:+.2%}", "right"),
            ],
        ]  # fmt: skip
        content += "<p></p>" + table(("", "plain cache>", "compressed cache>", "change>"), rows)
        text = (
            f"Measured on {facts['tokens']:,} tokens that follow prompts of {facts['prompt_tokens']} in windows of "
            f"{facts['sequence_length']}; at their end a cache takes {size(facts['cache_bytes'])} instead of {size(facts['full_bytes'])}."
        )
        if "tokens_each" in metrics:
            text += f" {own_tokens(metrics).capitalize()}."
        content += f'<p class="soft">{escape(text)}</p>'
    if "warning" in facts:
        content += f'<p class="soft">{escape(facts["warning"])}</p>'
    return content
