"""Page and picture of `speed_against_kl.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

COLORS = {"ours": "#0b6e4f", "llama.cpp": "#b04a3a", "ik_llama.cpp": "#c58b1b"}


class Point(NamedTuple):
    """One engine's format, as measured for a model."""

    engine: str
    label: str
    bits: float
    kl: float
    perplexity: float
    speed: dict[str, dict[str, float]]

    @property
    def own(self) -> bool:
        return self.engine == "ours"


def points(data: dict[str, Any], model: str) -> Iterator[Point]:
    """All that have been measured; ours once with each kind of kernels."""
    for name, point in data["points"].items():
        if "error" in point:
            continue
        engine, _, label = name.partition(" ")
        quality = point["quality"][model]
        for cell in point["requests"]:
            speed = {
                threads: {kind: statistics.median(one[kind] for one in rounds[cell]) for kind in ("decode", "prefill")}
                for threads, rounds in point["speed"].items()
                if rounds.get(cell)
            }
            shown = label if cell == "peer" else f"{label}, {cell}"
            yield Point(engine, shown, quality["bits"], quality[cell]["kl"], quality[cell]["perplexity"], speed)


def front(found: list[Point], threads: str) -> list[Point]:
    """Points that no other one beats in both KL divergence and speed, from the lowest KL divergence on."""
    kept: list[Point] = []
    for point in sorted((p for p in found if threads in p.speed), key=lambda p: (p.kl, -p.speed[threads]["decode"])):
        if not kept or point.speed[threads]["decode"] > kept[-1].speed[threads]["decode"]:
            kept.append(point)
    return kept


def advantage(ours: list[Point], peer: Point, threads: str) -> tuple[Point, float] | None:
    """The fastest of ours whose KL divergence is at most a peer's, and its speed as a ratio to the peer's."""
    able = [p for p in ours if threads in p.speed and p.kl <= peer.kl]
    if not able or threads not in peer.speed:
        return None
    best = max(able, key=lambda p: p.speed[threads]["decode"])
    return best, best.speed[threads]["decode"] / peer.speed[threads]["decode"]


SUMMARY = ("Q2_K", "IQ2_M", "IQ3_XXS", "IQ3_M", "Q4_0", "IQ4_XS", "Q4_K_M", "Q5_K_M")


def page(data: dict[str, Any]) -> str:
    """The page of the documentation."""
    machine, settings = data["machine"], data["settings"]
    lines = ["# Decode speed against KL divergence", ""]
    lines += ["Written by `benchmarks/speed_against_kl.py`, which says how it measures.", ""]
    lines += ["![decode speed against KL divergence](../images/speed_against_kl.svg)", ""]
    lines += [
        f"{machine['cpu']} with {machine['cores']} cores ({isa(machine)}), {settings['windows']} held-out windows of "
        f"{settings['window_tokens']} tokens, calibration on {settings['samples']}. Decoding {settings['new_tokens']} tokens behind 16, "
        f"{rounds(data)}, tokens/s of four layers of the 1.1B shape. `exact` and `fast` are kinds of kernels of ours; `2.5 bits` and "
        "the like are budgets; all of ours have `quality: best`. Where a budget differs between models, its speed is that of the first. "
        f"ik_llama.cpp repacks as it loads. The last-level cache of {machine['last_level_cache'] / 1e6:.0f} MB holds part of models of 60 "
        "to 150 MB, more of it the fewer bits they have: ratios of whole models may differ.",
        "",
    ]
    for model in data["models"]:
        found = sorted(points(data, model), key=lambda point: point.kl)
        ours = [point for point in found if point.own]
        lines += [f"## {model}", ""]
        for threads in ("1", "2"):
            above = [f"{p.engine} {p.label}" for p in front(found, threads) if not p.own]
            lines += [f"- Peers' points on the common front, {threads} thread(s): {', '.join(above) or 'none'}."]
        lines += [
            "",
            "Our fastest point whose KL divergence is at most that of a peer's type, and how much faster it decodes:",
            "",
        ]
        lines += [
            "| type | KL (nats) | llama.cpp, 1 thread | 2 | ik_llama.cpp, 1 thread | 2 |",
            "|---|---:|---|---|---|---|",
        ]
        named = {(point.engine, point.label): point for point in found}
        for kind in SUMMARY:
            peers = [named.get((engine, kind)) for engine in ("llama.cpp", "ik_llama.cpp")]
            divergences = " / ".join(f"{peer.kl:.4f}" for peer in peers if peer)
            cells = [beside(ours, peer, threads) for peer in peers for threads in ("1", "2")]
            lines.append(f"| {kind} | {divergences} | {' | '.join(cells)} |")
        lines += ["", "Everything:", ""]
        lines += [
            "| engine | format | bits | KL (nats) | perplexity | decode, 1 thread | 2 threads | prompt, 1 thread | 2 threads |"
        ]
        lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|"]
        for point in found:
            cells = [point.engine, point.label, f"{point.bits:.2f}", f"{point.kl:.4f}", f"{point.perplexity:.2f}"]
            for kind in ("decode", "prefill"):
                cells += [f"{point.speed[t][kind]:.0f}" if t in point.speed else "" for t in ("1", "2")]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += [f"- {name}: {point['error']}" for name, point in data["points"].items() if "error" in point]
    return "\n".join(lines).rstrip() + "\n"


def beside(ours: list[Point], peer: Point | None, threads: str) -> str:
    """`advantage` in words."""
    found = None if peer is None else advantage(ours, peer, threads)
    return "" if found is None else f"{found[1]:.2f}x ({found[0].label})"


def isa(machine: dict[str, Any]) -> str:
    """What its products use."""
    return (
        "AVX-512, VNNI, bf16"
        if "avx512_bf16" in machine["flags"]
        else "AVX2"
        if "avx2" in machine["flags"]
        else "no AVX2"
    )


def rounds(data: dict[str, Any]) -> str:
    """How often each was measured."""
    counts = {
        len(cell)
        for point in data["points"].values()
        if "error" not in point
        for cells in point["speed"].values()
        for cell in cells.values()
    }
    low, high = min(counts), max(counts)
    return f"median of {low} rounds" if low == high else f"median of {low} to {high} rounds"


def plot(data: dict[str, Any], file: Path) -> None:
    """Speed to the right, KL divergence upwards; each engine with its front, whose points are named."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models, all_threads = data["models"], ("1", "2")
    figure, axes = plt.subplots(len(models), len(all_threads), figsize=(15, 6 * len(models)), squeeze=False)
    for model, row in zip(models, axes, strict=True):
        found = list(points(data, model))
        for threads, axis in zip(all_threads, row, strict=True):
            for engine, color in COLORS.items():
                own = [p for p in found if p.engine == engine and threads in p.speed]
                axis.scatter(
                    [p.speed[threads]["decode"] for p in own], [p.kl for p in own], color=color, s=18, label=engine
                )
                best = front(own, threads)
                steps = [p.speed[threads]["decode"] for p in best], [p.kl for p in best]
                axis.step(*steps, where="pre", color=color, lw=1)
                for p, x, y in zip(best, *steps, strict=True):
                    axis.annotate(p.label, (x, y), fontsize=7, color=color, xytext=(3, 2), textcoords="offset points")
            axis.set_yscale("log")
            axis.set_title(f"{model}, {threads} thread{'s' if threads != '1' else ''}")
            axis.set_xlabel("decode, tokens/s (1.1B shape, 4 layers)")
            axis.set_ylabel("KL divergence, nats")
            axis.legend(loc="upper left")
    figure.suptitle(f"Decode speed against KL divergence; {data['machine']['cpu']}: lower and further right is better")
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = file.stem  # the same bytes every time
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
