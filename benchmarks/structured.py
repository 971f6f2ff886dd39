#!/usr/bin/env python
"""Structured pruning and recovery: perplexity against parameters for every ranking, without and with a refit of the readers, without and
with recovery; how much of what sparsity costs comes back; and what narrower models gain in decoding speed.

    python benchmarks/structured.py --work /tmp/structured --json out.json

Every cell is a recipe through `compress.apply`. Perplexity is that of the bundled held-out text. Training text is the standard library of
the running Python without what the held-out text has (recipes/checkpoints/corpus.py), or `--text FILE`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "recipes" / "checkpoints" / "stdlib-4m"
RANKINGS = ("random", "magnitude", "wanda", "gradient_free", "taylor", "obs")
DEPTH = ("random", "magnitude", "block_influence")


class Bench:
    """Runs recipes and remembers what came of them."""

    def __init__(self, work: Path, text: Path, model: Path, samples: int) -> None:
        self.work, self.model = work, model
        self.base = {
            "name": "structured",
            "model": str(model),
            "calibration": {"data": str(text), "samples": samples, "sequence_length": 256},
            "evaluate": {"data": "bundled", "sequence_length": 256, "samples": 128},
        }

    def apply(self, *stages: dict[str, Any], name: str = "artifact") -> Any:
        """The artifact of a recipe."""
        import compress

        return compress.apply(
            {**self.base, "stages": list(stages)}, output=self.work / name, quiet=True, overwrite=True
        )

    def cell(self, *stages: dict[str, Any], name: str = "artifact", **more: Any) -> dict[str, Any]:
        """What a recipe costs and gives."""
        made = self.apply(*stages, name=name)
        before, after = (made.metrics[when]["perplexity"] for when in ("before", "after"))
        found: dict[str, Any] = {**more, "perplexity_before": before, "perplexity": after, "kl": made.metrics["kl"]}
        for facts in made.manifest.get("passes", []):
            for key in ("parameters_before", "parameters_after"):
                if key in facts:
                    found[key] = facts[key]
        found["bytes"] = made.manifest["bytes"]["after"]
        print(json.dumps(found), flush=True)
        return found


def rankings(bench: Bench, ratios: list[float]) -> list[dict[str, Any]]:
    """Channels: each ranking, ratio, without and with a refit."""
    return [
        bench.cell(
            {"structure": {"method": method, "remove": "ffn", "ratio": ratio, "reconstruct": fitted}},
            remove="ffn", method=method, ratio=ratio, reconstruct=fitted,
        )
        for ratio in ratios
        for method in RANKINGS
        for fitted in (False, True)
    ]  # fmt: skip


def others(bench: Bench) -> list[dict[str, Any]]:
    """Heads and layers."""
    heads = [
        bench.cell(
            {"structure": {"method": method, "remove": "heads", "ratio": 0.5, "reconstruct": fitted}},
            remove="heads", method=method, ratio=0.5, reconstruct=fitted,
        )
        for method in RANKINGS
        for fitted in (False, True)
    ]  # fmt: skip
    layers = [
        bench.cell(
            {"structure": {"method": method, "remove": "layers", "keep": 3}}, remove="layers", method=method, ratio=0.25
        )
        for method in DEPTH
    ]
    return [*heads, *layers]


def recovery(bench: Bench, training: dict[str, Any]) -> list[dict[str, Any]]:
    """What recovery wins back, after structure and after sparsity."""
    found = []
    for ratio in (0.2, 0.5):
        for method in ("random", "gradient_free", "obs"):
            stage = {"structure": {"method": method, "remove": "ffn", "ratio": ratio}}
            for trained in (False, True):
                stages = [stage, {"recover": {"method": "finetune", **training}}] if trained else [stage]
                found.append(
                    bench.cell(*stages, remove="ffn", method=method, ratio=ratio, reconstruct=True, recovered=trained)
                )
    sparse = {"prune": {"method": "sparsegpt", "sparsity": 0.5}}
    settings: tuple[tuple[str, dict[str, Any] | None], ...] = (
        ("one-shot", None),
        ("squarehead", {"kl": 0.0}),
        ("kl", {"squarehead": 0.0}),
        ("squarehead + kl", {}),
    )
    for name, fields in settings:
        stages = [sparse] if fields is None else [sparse, {"recover": {"method": "finetune", **training, **fields}}]
        found.append(bench.cell(*stages, sparsity=0.5, recovery=name))
    lost = found[-len(settings)]
    for cell in found[-len(settings) + 1 :]:
        gap = lost["perplexity"] - lost["perplexity_before"]
        cell["won_back"] = (lost["perplexity"] - cell["perplexity"]) / gap
    return found


def speed(bench: Bench, hidden: int, inner: int, depth: int, threads: int, rounds: int) -> dict[str, Any]:
    """Decode speed of a random model large enough to be bound by memory, 8-bit, whole and without a quarter of
    its parameters.

    Both are timed in turn in one process, `rounds` times.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    import runtime

    source = bench.work / "wide"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=depth, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    AutoTokenizer.from_pretrained(BUNDLED).save_pretrained(source)
    budget = {"parameters": 0.75}
    cut = {
        "structure": {"method": "magnitude", "remove": "ffn", "budget": budget, "multiple": 128, "reconstruct": False}
    }
    weights = {"quantize": {"method": "rtn", "bits": 8, "group_size": 128}}
    wide = Bench(bench.work, Path(bench.base["calibration"]["data"]), source, 8)
    wide.base.pop("evaluate")
    paths = {
        "whole": wide.apply(weights, name="wide-whole").path,
        "cut": wide.apply(cut, weights, name="wide-cut").path,
    }
    models = {name: runtime.load(path, device="cpu", threads=threads) for name, path in paths.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            began = time.perf_counter()
            model.generate([5, 6, 7, 8], max_new_tokens=48, ignore_eos=True)
            if turn:  # the first one warms up
                times[name].append(time.perf_counter() - began)
    ratios = [whole / smaller for whole, smaller in zip(times["whole"], times["cut"], strict=True)]
    found = {
        "shape": {"hidden": hidden, "inner": inner, "layers": depth}, "removed": "channels, a quarter of the parameters",
        "threads": threads,
        "tokens_per_second": {name: 48 / statistics.median(each) for name, each in times.items()},
        "speedup": statistics.median(ratios), "speedups": [round(ratio, 3) for ratio in ratios],
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


def plot(result: dict[str, Any], file: Path) -> None:
    """Perplexity against parameters, a line a ranking."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = [cell for cell in result["rankings"] if cell["remove"] == "ffn"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, fitted in zip(axes, (False, True), strict=True):
        for method in RANKINGS:
            own = sorted(
                (c for c in cells if c["method"] == method and c["reconstruct"] is fitted),
                key=lambda c: -c["parameters_after"],
            )
            axis.plot(
                [c["parameters_after"] / 1e6 for c in own], [c["perplexity"] for c in own], marker="o", label=method
            )
        axis.axhline(cells[0]["perplexity_before"], color="grey", linewidth=0.8)
        axis.set_title("readers refitted" if fitted else "as they are")
        axis.set_xlabel("parameters, millions")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("perplexity of held-out text")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(file)


def training_text(work: Path, limit: int) -> Path:
    """The standard library without what is held out."""
    file = work / "train.txt"
    if not file.is_file():
        sys.path.insert(0, str(ROOT / "recipes" / "checkpoints"))
        import corpus

        file.write_text(corpus.build_texts()["train"][:limit], encoding="utf-8")
    return file


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--text", type=Path, help="to calibrate and train on")
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--parts", nargs="*", choices=("rankings", "others", "recovery", "speed"))
    parser.add_argument("--ratios", nargs="*", type=float, default=[0.1, 0.2, 0.35, 0.5])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=6144, help="that recovery is trained on")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    text = arguments.text or training_text(arguments.work, 8_000_000)
    bench = Bench(arguments.work, text, arguments.model, arguments.samples)
    training = {
        "samples": arguments.rows, "sequence_length": 128, "steps": arguments.steps, "batch_size": 16, "evaluate_every": 100,
        "learning_rate": arguments.learning_rate, "patience": None,
    }  # fmt: skip
    parts = arguments.parts or ["rankings", "others", "recovery", "speed"]
    result: dict[str, Any] = {
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": arguments.threads, "torch": torch.__version__},
        "model": arguments.model.name, "training": training,
    }  # fmt: skip
    if "rankings" in parts:
        result["rankings"] = rankings(bench, arguments.ratios)
    if "others" in parts:
        result["others"] = others(bench)
    if "recovery" in parts:
        result["recovery"] = recovery(bench, training)
    if "speed" in parts:
        result["speed"] = speed(bench, 1024, 4096, 8, arguments.threads, arguments.rounds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None and "rankings" in result:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
