"""Table and picture of `speed_against_kl.py`."""

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


def table(data: dict[str, Any]) -> str:
    """Markdown: all points of each model, and beside each of the peers' points the fastest of ours that is no worse."""
    lines = []
    for model in data["models"]:
        found = sorted(points(data, model), key=lambda point: point.kl)
        ours = [point for point in found if point.own]
        lines += [f"**{model}**", ""]
        lines += [
            "| engine | format | bits | KL (nats) | perplexity | decode, 1 thread | 2 | ours at this KL, 1 thread | 2 |"
        ]
        lines += ["|---|---|---:|---:|---:|---:|---:|---|---|"]
        for point in found:
            speeds = [f"{point.speed[t]['decode']:.0f}" if t in point.speed else "" for t in ("1", "2")]
            beside = []
            for threads in ("1", "2"):
                better = None if point.own else advantage(ours, point, threads)
                beside.append("" if better is None else f"{better[1]:.2f}x ({better[0].label})")
            cells = [
                point.engine,
                point.label,
                f"{point.bits:.2f}",
                f"{point.kl:.4f}",
                f"{point.perplexity:.2f}",
                *speeds,
                *beside,
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        for threads in ("1", "2"):
            above = [point for point in front(found, threads) if not point.own]
            names = ", ".join(f"{p.engine} {p.label}" for p in above) or "none"
            lines.append(f"Peers' points on the common front, {threads} thread(s): {names}.")
        lines.append("")
    failed = [f"- {name}: {point['error']}" for name, point in data["points"].items() if "error" in point]
    return "\n".join(lines + failed)


def plot(data: dict[str, Any], file: Path) -> None:
    """KL divergence downwards, speed to the right; ours with its front."""
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
                for p in own:
                    place = (p.speed[threads]["decode"], p.kl)
                    axis.annotate(p.label, place, fontsize=6, color=color, xytext=(3, 2), textcoords="offset points")
            best = front([p for p in found if p.own], threads)
            axis.step(
                [p.speed[threads]["decode"] for p in best],
                [p.kl for p in best],
                where="pre",
                color=COLORS["ours"],
                lw=1,
            )
            axis.set_yscale("log")
            axis.set_title(f"{model}, {threads} thread{'s' if threads != '1' else ''}")
            axis.set_xlabel("decode, tokens/s (1.1B shape, 4 layers)")
            axis.set_ylabel("KL divergence, nats")
            axis.legend(loc="upper left")
    figure.suptitle(f"Decode speed against KL divergence; {data['machine']['cpu']}: lower and further right is better")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
