"""Summary of a run on the screen: what passed, failed and was left out, and the lines of the docs that its figures replace.

A line that speaks of GPUs ends in `<!-- gpu: NAME -->`; `LINES[NAME]` says what is known now.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARK = re.compile(r"<!-- gpu: (\w+) -->")
DRY = "DRY RUN, NOT A MEASUREMENT: "
Content = dict[str, Any]


def marked_lines(root: Path) -> Iterator[tuple[Path, int, str, str]]:
    """(file, number of the line, name of its mark, the line) of README.md and the docs."""
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for name in MARK.findall(line):
                yield path.relative_to(root), number, name, line


def summary(content: Content, root: Path) -> str:
    """For people."""
    lines = []
    for title, statuses in (
        ("passed", ("passed", "done")), ("failed", ("failed",)), ("left out", ("incomplete", "left out", "missing peer")),
    ):  # fmt: skip
        lines.append(f"{title}:")
        found = [
            (n, part, o)
            for n, parts in content["sections"].items()
            for part, o in parts.items()
            if o["status"] in statuses
        ]
        for name, part, outcome in found:
            reason = f": {outcome['reason']}" if "reason" in outcome else ""
            lines.append(f"  {name}, {part}{reason}")
            lines += [f"    {failure}" for failure in outcome.get("failed", [])[:20]]
            lines += [f"    no {peer}: {why}" for peer, why in outcome.get("missing_peers", {}).items()]
        if not found:
            lines.append("  nothing")
    broken = [
        f"  {n}, {which}, {peer}: {why}"
        for n, parts in content["sections"].items()
        for which, o in parts.items()
        for peer, why in o.get("failed_peers", {}).items()
    ]
    lines += ["peers that failed:", *(broken or ["  nothing"])]
    lines.append("lines to replace (none by figures of a dry run):" if content["dry_run"] else "lines to replace:")
    said = {name: write(content) for name, write in LINES.items()}
    for path, number, name, line in marked_lines(root):
        lines += [f"  {path}:{number}: {MARK.sub('', line).strip()}", f"    -> {said[name]} <!-- gpu: {name} -->"]
    return "\n".join(lines)


# -------------------------------------------------------------------- sentences
def part(content: Content, section: str, which: str) -> Content:
    """The outcome of a part; {} where there is none."""
    found: Content = content["sections"].get(section, {}).get(which, {})
    return found


def rows(content: Content, section: str, **wanted: Any) -> list[Content]:
    """Rows of a section's timing with these values."""
    every = part(content, section, "timing").get("rows", [])
    return [row for row in every if all(row.get(key) == value for key, value in wanted.items())]


def only(content: Content, section: str, figure: str, **wanted: Any) -> float | None:
    """A figure of the one row with these values; None: it was not measured."""
    found = [row[figure] for row in rows(content, section, **wanted) if row.get(figure)]
    return found[0] if found else None


def on(content: Content, text: str) -> str:
    """A sentence about this machine; of a dry run nobody can mistake it."""
    return (DRY if content["dry_run"] else "") + text.format(gpu=content["machine"]["device"])


def status(content: Content) -> str:
    """Which checks passed."""
    kinds: dict[str, list[str]] = {}
    for name, parts in content["sections"].items():
        if "check" in parts:
            kinds.setdefault(parts["check"]["status"], []).append(name)
    told = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items()) or "no check ran"
    return on(content, f"Ran on {{gpu}} at commit {content['commit']}, checks {told}.")


def speed(content: Content) -> str:
    """Decoding and products, as ratios where there is a peer."""
    told = []
    shape = part(content, "llama", "timing").get("facts", {}).get("shape", "?")
    for row in rows(content, "llama", engine="fused w4"):
        if row.get("tokens_per_second") and "depth" in row:
            where = {"batch": row["batch"], "depth": row["depth"]}
            text = f"{row['batch']} at depth {row['depth']}: {row['tokens_per_second']:.0f} tokens/s"
            if row.get("share_of_bandwidth_bound"):
                text += f", {row['share_of_bandwidth_bound']:.0%} of the bandwidth bound"
            for peer, section in (
                ("vllm w4", "vllm"),
                ("gpt-fast w4", "gpt_fast"),
                ("transformers bf16, eager", "llama"),
            ):
                theirs = only(content, section, "step_ms", engine=peer, **where)
                text += f", {theirs / row['step_ms']:.2f}x {peer}" if theirs else ""
            told.append(text)
    products = [row for row in rows(content, "kernels") if row.get("w4a16_times_as_fast_as")]
    for count in sorted({row["rows"] for row in products}):
        ratios = [row["w4a16_times_as_fast_as"]["cublas_bf16"] for row in products if row["rows"] == count]
        told.append(f"W4A16 products of {count} rows {min(ratios):.2f}x to {max(ratios):.2f}x cuBLAS bf16")
    return on(
        content,
        f"On {{gpu}}, {shape} shape in 4 bits: {'; '.join(told)}." if told else "Speed was not measured on {gpu}.",
    )


def checks(content: Content) -> str:
    """Worst errors, and whether steps were captured."""
    worst: dict[str, float] = {}
    for name in ("kernels", "attention", "llama"):
        worst |= part(content, name, "check").get("facts", {}).get("worst", {})
    engine = part(content, "llama", "check").get("facts", {}).get("engine", "no engine")
    errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items()) or "none measured"
    return on(content, f"On {{gpu}}, largest errors: {errors}; the engine is the {engine}.")


def engine(content: Content) -> str:
    """For a cell of a table."""
    outcome = part(content, "llama", "check").get("status", "left out")
    return on(content, f"check on {{gpu}}: {outcome}")


def kv_cache(content: Content) -> str:
    """Ratios of caches."""
    told = []
    for row in rows(content, "kv_cache"):
        ratios = [f"{name} {value:.2f}x" for name, value in row.items() if " against " in name]
        told += [f"{row['tokens']} tokens, batch {row['batch']}: {', '.join(ratios)}"] if ratios else []
    return on(content, f"On {{gpu}}, {'; '.join(told)}." if told else "Caches were not measured on {gpu}.")


def tensorrt(content: Content) -> str:
    """Whether engines build, and their speed beside ours."""
    outcome = part(content, "tensorrt", "check")
    if outcome.get("status") != "passed":
        return on(
            content, f"TensorRT on {{gpu}}: {outcome.get('status', 'left out')}, {outcome.get('reason', 'no reason')}."
        )
    ours, theirs = (
        only(content, "tensorrt", "tokens_per_second", engine=name, batch=1) for name in ("runtime", "TensorRT")
    )
    ratio = f", one sequence at {theirs / ours:.2f}x of this runtime's tokens/s" if ours and theirs else ""
    return on(content, f"TensorRT engines of the bundled model build and verify on {{gpu}}{ratio}.")


LINES: dict[str, Callable[[Content], str]] = {
    "status": status, "speed": speed, "checks": checks, "engine": engine, "kv_cache": kv_cache, "tensorrt": tensorrt,
}  # fmt: skip
