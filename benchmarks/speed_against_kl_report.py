"""Page and picture of `speed_against_kl.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

#: Types of both peers that the page puts ours beside.
SUMMARY = ("Q2_K", "IQ2_M", "IQ3_XXS", "IQ3_M", "Q4_0", "IQ4_XS", "Q4_K_M", "Q5_K_M")
COLORS = {"ours": "#0b6e4f", "llama.cpp": "#b04a3a", "ik_llama.cpp": "#c58b1b"}


class Point(NamedTuple):
    """One engine's format, as measured for a model; `speed` is {threads: {"decode" and "prefill": tokens/s of every round}}."""

    engine: str
    label: str
    bits: float
    kl: float
    perplexity: float
    speed: dict[str, dict[str, list[float]]]

    def decode(self, threads: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.speed[threads]["decode"])


def points(data: dict[str, Any], model: str) -> Iterator[Point]:
    """All that have been measured; ours once with each kind of kernels."""
    for name, point in data["points"].items():
        if "error" in point:
            continue
        engine, _, label = name.partition(" ")
        quality = point["quality"][model]
        for cell in point["requests"]:
            speed = {
                threads: {kind: [one[kind] for one in cells[cell]] for kind in ("decode", "prefill")}
                for threads, cells in point["speed"].items()
                if cells.get(cell)
            }
            shown = label if cell == "peer" else f"{label}, {cell}"
            yield Point(engine, shown, quality["bits"], quality[cell]["kl"], quality[cell]["perplexity"], speed)


def front(measured: list[Point], threads: str) -> list[Point]:
    """Points that no other one beats in both KL divergence and speed, from the lowest KL divergence on."""
    kept: list[Point] = []
    able = [point for point in measured if threads in point.speed]
    for point in sorted(able, key=lambda point: (point.kl, -point.decode(threads))):
        if not kept or point.decode(threads) > kept[-1].decode(threads):
            kept.append(point)
    return kept


def advantage(ours: list[Point], peer: Point, threads: str) -> tuple[Point, float] | None:
    """Of ours whose KL divergence is at most a peer's, the fastest, and its speed as a ratio to the peer's.

    It is chosen by half of the rounds and compared by the others, both ways round: the best of many by the same rounds would be the one
    that noise helped most.
    """
    able = [point for point in ours if len(point.speed.get(threads, {}).get("decode", ())) > 1 and point.kl <= peer.kl]
    if not able or threads not in peer.speed:
        return None
    ratios = []
    for chosen, compared in ((0, 1), (1, 0)):
        best = max(able, key=lambda point: statistics.median(point.speed[threads]["decode"][chosen::2]))
        ratios.append(statistics.median(best.speed[threads]["decode"][compared::2]) / peer.decode(threads))
    return max(able, key=lambda point: point.decode(threads)), statistics.geometric_mean(ratios)


def page(data: dict[str, Any]) -> str:
    """The page of the documentation."""
    machine, settings = data["machine"], data["settings"]
    instructions = ", ".join(
        flag for flag in ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8") if flag in machine["flags"]
    )
    lines = ["# Decode speed against KL divergence", ""]
    lines += ["Written by `benchmarks/speed_against_kl.py`, which says how it measures.", ""]
    lines += ["![decode speed against KL divergence](../images/speed_against_kl.svg)", ""]
    lines += [
        f"{machine['cpu']} with {machine['cores']} cores ({instructions}); {settings['windows']} held-out windows of "
        f"{settings['window_tokens']} tokens, each read as one prompt; calibration on {settings['samples']}.",
        "",
        f"- Speed: tokens/s of four layers of the 1.1B shape (random values, vocabulary cut in proportion, head of 8 bits), decoding "
        f"{settings['new_tokens']} tokens behind 16. {rounds(data)} ik_llama.cpp repacks as it loads.",
        f"- The last-level cache of {machine['last_level_cache'] / 1e6:.0f} MB holds part of models of 60 to 150 MB, more of it the fewer "
        "bits they have: ratios of whole models may differ.",
        "- `exact` and `fast` are kinds of kernels of ours; `2.5 bits` and the like are budgets; all of ours have `quality: best`. Where a "
        "mixture or a budget differs between the models, its speed is that of the first.",
        "",
    ]
    for model in data["models"]:
        found = sorted(points(data, model), key=lambda point: point.kl)
        ours = [point for point in found if point.engine == "ours"]
        lines += [f"## {model}", ""]
        for threads in ("1", "2"):
            unbeaten = [f"{p.engine} {p.label}" for p in front(found, threads) if p.engine != "ours"]
            plural = "" if threads == "1" else "s"
            lines += [
                f"- Types of the peers that nothing beats in both, {threads} thread{plural}: {', '.join(unbeaten) or 'none'}."
            ]
        lines += [
            "",
            "How much faster we decode at no more KL divergence. Ours is chosen by half of the rounds and compared by the others; named is "
            "the fastest of all rounds.",
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
                cells += [
                    f"{statistics.median(point.speed[t][kind]):.0f}" if t in point.speed else "" for t in ("1", "2")
                ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += [f"- {name}: {point['error']}" for name, point in data["points"].items() if "error" in point]
    return "\n".join(lines).rstrip() + "\n"


def beside(ours: list[Point], peer: Point | None, threads: str) -> str:
    """`advantage` in words."""
    found = None if peer is None else advantage(ours, peer, threads)
    return "" if found is None else f"{found[1]:.2f}x ({found[0].label})"


def rounds(data: dict[str, Any]) -> str:
    """How often each speed was measured, and how far its rounds lie apart."""
    decoded = [
        values
        for point in points(data, data["models"][0])
        for values in (speed["decode"] for speed in point.speed.values())
    ]
    counts = sorted({len(values) for values in decoded})
    apart = sorted(max(values) / min(values) - 1 for values in decoded)
    often = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))
    return (
        f"Medians of {often} rounds, of which the fastest is {apart[len(apart) // 2]:.0%} above the slowest in half of the cells, "
        f"{apart[-1]:.0%} at most."
    )


def plot(data: dict[str, Any], file: Path) -> None:
    """Speed to the right, KL divergence upwards; every engine with its front, whose points are named."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": file.stem, "svg.fonttype": "none"}  # the same bytes every time; letters as letters
    models, all_threads = data["models"], ("1", "2")
    figure, axes = plt.subplots(len(models), len(all_threads), figsize=(12, 5 * len(models)), squeeze=False)
    for model, row in zip(models, axes, strict=True):
        found = list(points(data, model))
        for threads, axis in zip(all_threads, row, strict=True):
            for engine, color in COLORS.items():
                measured = [p for p in found if p.engine == engine and threads in p.speed]
                speeds = [p.decode(threads) for p in measured]
                axis.scatter(speeds, [p.kl for p in measured], color=color, s=16, label=engine)
                best = front(measured, threads)
                steps = [p.decode(threads) for p in best], [p.kl for p in best]
                axis.step(*steps, where="pre", color=color, lw=1)
                for p, x, y in zip(best, *steps, strict=True):
                    axis.annotate(p.label, (x, y), fontsize=8, color=color, xytext=(3, 2), textcoords="offset points")
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")  # exponents would be too small to read
            axis.margins(x=0.12)
            axis.set_title(f"{model}, {threads} thread{'s' if threads != '1' else ''}")
            axis.set_xlabel("decode, tokens/s (1.1B shape, 4 layers)")
            axis.set_ylabel("KL divergence, nats")
            axis.legend(loc="upper left")
    figure.suptitle(f"Decode speed against KL divergence; {data['machine']['cpu']}: lower and further right is better")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
