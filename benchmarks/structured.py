#!/usr/bin/env python
"""Structured pruning and recovery: perplexity against parameters and against measured CPU latency for every ranking, without and with a
refit of the readers, without and with recovery; how much of what sparsity costs comes back; what narrower models gain in speed.

    python benchmarks/structured.py --work DIR --json out.json
    python benchmarks/structured_model.py --work DIR --out DIR/gpt2          # a second model
    python benchmarks/structured.py --work DIR --model DIR/gpt2 --json gpt2.json --parts channels layers latency
    python benchmarks/structured_plot.py out.json gpt2.json --out plot.svg
    python benchmarks/structured_model.py --work DIR --out DIR/moe --family moe --steps 360
    python benchmarks/structured.py --work DIR --model DIR/moe --json moe.json --parts experts

Every cell is a recipe through `compress.apply`. Perplexity is that of the bundled held-out text. Training text is the standard library of
the running Python without what the held-out text has (recipes/checkpoints/corpus.py), or `--text FILE`. A cell that is in the file
`--json` already is not measured again. The part `experts` needs a mixture of experts, which the bundled model is not: it runs where
`--parts` names it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "recipes" / "checkpoints" / "stdlib-4m"
RANKINGS = ("random", "magnitude", "wanda", "gradient_free", "taylor", "obs")
DEPTH = ("random", "magnitude", "block_influence")
PARTS = ("channels", "heads", "layers", "hidden", "vocabulary", "widths", "sparsity", "latency", "speed")
ON_REQUEST = ("experts",)
CHARACTERS = 6_000_000  # of the training text
Stage = dict[str, Any]


class Bench:
    """Runs recipes and keeps what came of them in a file."""

    def __init__(self, work: Path, text: Path, model: Path, samples: int, file: Path | None) -> None:
        self.work, self.file = work, file
        self.base = {
            "name": "structured",
            "model": str(model),
            "calibration": {"data": str(text), "samples": samples, "sequence_length": 256},
            "evaluate": {"data": "bundled", "sequence_length": 256, "samples": 128},
        }
        known = file is not None and file.is_file()
        self.result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file and known else {}

    def keep(self) -> None:
        """Write what there is."""
        if self.file is not None:
            self.file.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")

    def apply(self, *stages: Stage, name: str = "artifact", **sections: Any) -> Any:
        """The artifact of a recipe."""
        import compress

        recipe = {**self.base, "stages": list(stages), **sections}
        return compress.apply(recipe, output=self.work / name, quiet=True, overwrite=True)

    def cell(self, part: str, *stages: Stage, **key: Any) -> dict[str, Any]:
        """What a recipe costs and gives; `key` tells it from the others of its part."""
        cells = self.result.setdefault(part, [])
        for known in cells:
            if all(known.get(name) == value for name, value in key.items()):
                return known  # type: ignore[no-any-return]
        made = self.apply(*stages)
        before, after = (made.metrics[when]["perplexity"] for when in ("before", "after"))
        found: dict[str, Any] = {**key, "perplexity_before": before, "perplexity": after, "kl": made.metrics.get("kl")}
        for facts in made.manifest.get("passes", []):
            if "remove" in facts:
                names = ("parameters_before", "parameters_after", "after", "widths")
                found |= {name: facts[name] for name in names if name in facts}
                if facts["remove"] == "experts":
                    found["experts"] = [layer["experts"] for layer in facts["layers"]]
        found["seconds"] = round(sum(made.seconds.values()), 1)
        print(json.dumps(found), flush=True)
        cells.append(found)
        self.keep()
        return found


def cut(remove: str, method: str, ratio: float, **fields: Any) -> Stage:
    """A stage that removes structure."""
    return {"structure": {"method": method, "remove": remove, "ratio": ratio, **fields}}


def channels(bench: Bench, ratios: Sequence[float], recovered: Sequence[float], training: dict[str, Any]) -> None:
    """Channels: each ranking and ratio, as the readers are and refitted; some of the refitted ones recovered."""
    for ratio in ratios:
        for method in RANKINGS:
            for fitted in (False, True):
                stage = cut("ffn", method, ratio, reconstruct=fitted)
                key = {"remove": "ffn", "method": method, "ratio": ratio, "reconstruct": fitted}
                bench.cell("channels", stage, **key, recovered=False)
    for ratio in recovered:
        for method in RANKINGS:
            stages = cut("ffn", method, ratio), {"recover": {"method": "finetune", **training}}
            key = {"remove": "ffn", "method": method, "ratio": ratio, "reconstruct": True, "recovered": True}
            bench.cell("channels", *stages, **key, steps=training["steps"])


def heads(bench: Bench) -> None:
    """Half of the groups of heads."""
    for method in RANKINGS:
        for fitted in (False, True):
            stage = cut("heads", method, 0.5, reconstruct=fitted)
            bench.cell("heads", stage, remove="heads", method=method, ratio=0.5, reconstruct=fitted, recovered=False)


def layers(bench: Bench, training: dict[str, Any]) -> None:
    """A quarter of the layers."""
    for method in DEPTH:
        for trained in (False, True):
            stages = [cut("layers", method, 0.25)]
            if trained:
                stages.append({"recover": {"method": "finetune", **training}})
            bench.cell("layers", *stages, remove="layers", method=method, ratio=0.25, recovered=trained)


def hidden(bench: Bench, training: dict[str, Any]) -> None:
    """An eighth and a quarter of the dimensions of the hidden state."""
    for ratio in (0.125, 0.25):
        for method in ("random", "magnitude", "activation"):
            for fitted, trained in ((False, False), (True, False), (True, True)):
                stages = [cut("hidden", method, ratio, reconstruct=fitted)]
                if trained:
                    stages.append({"recover": {"method": "finetune", **training}})
                key = {
                    "remove": "hidden",
                    "method": method,
                    "ratio": ratio,
                    "reconstruct": fitted,
                    "recovered": trained,
                }
                bench.cell("hidden", *stages, **key)


def vocabulary(bench: Bench, training: dict[str, Any]) -> None:
    """An eighth and a fifth of the tokens; the calibration text says which stay, and has too many for a quarter.

    Recovery learns from text alone, as the whole model would say the same of the tokens that are left; and gently, as the bundled model
    knows the text from its own training.
    """
    training = {**training, "cross_entropy": 1.0, "kl": 0.0, "squarehead": 0.0, "learning_rate": 1e-4}
    for ratio in (0.125, 0.2):
        for trained in (False, True):
            stages = [cut("vocabulary", "frequency", ratio, multiple=1)]
            if trained:
                stages.append({"recover": {"method": "finetune", **training}})
            bench.cell("vocabulary", *stages, remove="vocabulary", method="frequency", ratio=ratio, recovered=trained)


def experts(bench: Bench) -> None:
    """A quarter and half of the experts of each layer; which stay is kept, to compare."""
    for ratio in (0.25, 0.5):
        for method in ("random", "routing", "reap"):
            bench.cell("experts", cut("experts", method, ratio), remove="experts", method=method, ratio=ratio)


def widths(bench: Bench, ratios: Sequence[float]) -> None:
    """As many channels in every layer, or as many in all, spread by the errors of the layers."""
    for ratio in ratios:
        for method in ("wanda", "obs"):
            for allocation in ("uniform", "error"):
                stage = cut("ffn", method, ratio, allocation=allocation)
                bench.cell("widths", stage, method=method, ratio=ratio, allocation=allocation)


def sparsity(bench: Bench, training: dict[str, Any], steps: int) -> None:
    """What recovery wins back of what one-shot SparseGPT at 50 % has lost."""
    sparse = {"prune": {"method": "sparsegpt", "sparsity": 0.5}}
    lost = bench.cell("sparsity", sparse, sparsity=0.5, recovery="one-shot", steps=0)
    objectives: dict[str, dict[str, Any]] = {
        "squarehead": {"kl": 0.0},
        "kl": {"squarehead": 0.0},
        "squarehead + kl": {},
    }
    runs = [(name, fields, training["steps"]) for name, fields in objectives.items()]
    for name, fields, length in [*runs, ("squarehead + kl", {}, steps)]:
        stage = {"recover": {"method": "finetune", **training, **fields, "steps": length}}
        cell = bench.cell("sparsity", sparse, stage, sparsity=0.5, recovery=name, steps=length)
        gap = lost["perplexity"] - lost["perplexity_before"]
        cell["won_back"] = (lost["perplexity"] - cell["perplexity"]) / gap
    bench.keep()


def latency(bench: Bench, ratios: Sequence[float], weights: str, threads: int, rounds: int) -> None:
    """Seconds that a decoded token takes of each shape, weights of 8 bits or as stored: all are loaded and timed in turn."""
    import runtime

    stored = [{"quantize": {"method": "rtn", "bits": 8, "group_size": "channel"}}] if weights == "8 bits" else []
    cuts = {f"ffn {ratio}": [cut("ffn", "random", ratio, reconstruct=False)] for ratio in ratios}
    cuts |= {"layers 0.25": [cut("layers", "random", 0.25)]}
    if "heads" in bench.result:
        cuts |= {"heads 0.5": [cut("heads", "random", 0.5, reconstruct=False)]}
    shapes = {"whole": list[Stage](), **cuts}
    models = {}
    for name, stages in shapes.items():
        path = bench.base["model"]
        if stages or stored:
            path = bench.apply(*stages, *stored, name=f"latency-{name.replace(' ', '-')}", evaluate=None).path
        models[name] = runtime.load(path, device="cpu", threads=threads)
    times = timed(models, rounds, 96)
    result = {
        name: {"ms_per_token": 1e3 * statistics.median(each), "of_whole": statistics.median(
            own / whole for own, whole in zip(each, times["whole"], strict=True))}
        for name, each in times.items()
    }  # fmt: skip
    bench.result["latency"] = {"threads": threads, "rounds": rounds, "weights": weights, "shapes": result}
    print(json.dumps(bench.result["latency"]), flush=True)
    bench.keep()


def timed(models: dict[str, Any], rounds: int, tokens: int) -> dict[str, list[float]]:
    """Seconds a token of each model, all in turn, so many times; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            began = time.perf_counter()
            model.generate([5, 6, 7, 8], max_new_tokens=tokens, ignore_eos=True)
            if turn:
                times[name].append((time.perf_counter() - began) / tokens)
    return times


def speed(bench: Bench, hidden: int, inner: int, depth: int, threads: int, rounds: int) -> None:
    """Decode speed of a random model large enough to be bound by memory, 8-bit, whole and without a quarter of its parameters."""
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
    fields = {"budget": {"parameters": 0.75}, "multiple": 128, "reconstruct": False}
    less: Stage = {"structure": {"method": "magnitude", "remove": "ffn", **fields}}
    weights = {"quantize": {"method": "rtn", "bits": 8, "group_size": 128}}
    models = {}
    for name, stages in {"whole": [weights], "cut": [less, weights]}.items():
        made = bench.apply(*stages, name=f"wide-{name}", model=str(source), evaluate=None)
        models[name] = runtime.load(made.path, device="cpu", threads=threads)
    times = timed(models, rounds, 48)
    ratios = [whole / smaller for whole, smaller in zip(times["whole"], times["cut"], strict=True)]
    bench.result["speed"] = {
        "shape": {"hidden": hidden, "inner": inner, "layers": depth}, "removed": "channels, a quarter of the parameters",
        "threads": threads, "tokens_per_second": {name: 1 / statistics.median(each) for name, each in times.items()},
        "speedup": statistics.median(ratios), "speedups": [round(ratio, 3) for ratio in ratios],
    }  # fmt: skip
    print(json.dumps(bench.result["speed"]), flush=True)
    bench.keep()


def training_text(work: Path, limit: int | None) -> Path:
    """The standard library without what is held out; its first characters, or all."""
    file = work / ("train.txt" if limit else "all.txt")
    if not file.is_file():
        sys.path.insert(0, str(ROOT / "recipes" / "checkpoints"))
        import corpus

        work.mkdir(parents=True, exist_ok=True)
        file.write_text(corpus.build_texts()["train"][:limit], encoding="utf-8")
    return file


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--text", type=Path, help="to calibrate and train on")
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--parts", nargs="*", choices=(*PARTS, *ON_REQUEST), default=PARTS)
    parser.add_argument("--ratios", nargs="*", type=float, default=[0.1, 0.2, 0.35, 0.5])
    parser.add_argument("--recovered", nargs="*", type=float, default=[0.5], help="ratios that are also recovered")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150, help="of each recovery")
    parser.add_argument("--long", type=int, default=2000, help="steps of the longest one, after sparsity")
    parser.add_argument("--rows", type=int, default=6800, help="that recovery is trained on")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--weights",
        choices=("8 bits", "bfloat16"),
        default="8 bits",
        help="of the shapes that are timed; GPT-2's Conv1D stays bfloat16",
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    text = arguments.text or training_text(arguments.work, CHARACTERS)
    bench = Bench(arguments.work, text, arguments.model, arguments.samples, arguments.json)
    training = {
        "samples": arguments.rows, "sequence_length": 256, "steps": arguments.steps, "batch_size": 8, "evaluate_every": 100,
        "learning_rate": arguments.learning_rate, "patience": None,
    }  # fmt: skip
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "torch": torch.__version__,
    }
    bench.result |= {
        "machine": machine, "model": arguments.model.name, "training": training,
        "text": {"characters": len(text.read_text(encoding="utf-8")), "sha256": hashlib.sha256(text.read_bytes()).hexdigest()},
    }  # fmt: skip
    run = {
        "channels": lambda: channels(bench, arguments.ratios, arguments.recovered, training),
        "heads": lambda: heads(bench),
        "layers": lambda: layers(bench, training),
        "hidden": lambda: hidden(bench, training),
        "vocabulary": lambda: vocabulary(bench, training),
        "experts": lambda: experts(bench),
        "widths": lambda: widths(bench, arguments.ratios),
        "sparsity": lambda: sparsity(bench, training, arguments.long),
        "latency": lambda: latency(bench, arguments.ratios, arguments.weights, arguments.threads, arguments.rounds),
        "speed": lambda: speed(bench, 2048, 8192, 6, arguments.threads, arguments.rounds),
    }
    for part in arguments.parts:
        run[part]()
    bench.keep()


if __name__ == "__main__":
    main()
