#!/usr/bin/env python
"""Peak memory of `compress apply`: flat in depth, what a limit does, a 7B shape, and what the plan said before; peers beside.

    python benchmarks/memory.py --work ~/scratch                                  all parts of ours, on random checkpoints made there
    python benchmarks/memory.py --work ~/scratch --only peers --peers ~/peers     the peers of `benchmarks/peers/setup.sh`
    python benchmarks/memory.py --work ~/scratch --only gptq7b --force            one part again

Parts: `depth` (24 and 96 layers of one width), `limits` (two layers of the width of 7B under several limits, files compared), `rtn7b`
and `gptq7b` (32 such layers, 13.5 GB in bfloat16), `peers`. Every figure is of a process of its own: the largest resident memory that
the kernel saw, mapped files included. What is in the JSON already is not measured again, so an interrupted benchmark goes on; a 7B run
that was cut off is resumed, and its figure is then the largest of its processes'. Weights are random: times and memory mean something,
errors do not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import last_error, measure
from where import commit, cpu_name, memory_gb

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "memory.json"
PARTS = ("depth", "limits", "rtn7b", "gptq7b", "peers")
SHAPES = {
    "24 layers": {"layers": 24, "hidden": 768, "intermediate": 2048, "heads": 12, "kv-heads": 12, "vocabulary": 32000},
    "96 layers": {"layers": 96, "hidden": 768, "intermediate": 2048, "heads": 12, "kv-heads": 12, "vocabulary": 32000},
    "2 layers of 7B": {"layers": 2, "hidden": 4096, "intermediate": 11008, "heads": 32, "kv-heads": 32, "vocabulary": 32000},
    "7B": {"layers": 32, "hidden": 4096, "intermediate": 11008, "heads": 32, "kv-heads": 32, "vocabulary": 32000},
}  # fmt: skip
SAMPLES, LENGTH = 8, 512
LIMIT = "6GB"


class Bench:
    """One invocation."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.work: Path = arguments.work
        self.data: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
        self.environment |= {"PYTHONPATH": str(HERE.parent), "TOKENIZERS_PARALLELISM": "false"}

    # ------------------------------------------------------------ inputs
    def checkpoint(self, shape: str) -> Path:
        """A random checkpoint of a shape, written layer by layer where it is not there yet."""
        path = self.work / shape.replace(" ", "-")
        if not (path / "config.json").exists():
            options = [text for key, value in SHAPES[shape].items() for text in (f"--{key}", str(value))]
            tokenizer = HERE.parent / "recipes" / "checkpoints" / "stdlib-4m"
            command = [sys.executable, str(HERE / "make_random_llama.py"), str(path), "--tokenizer", str(tokenizer)]
            subprocess.run([*command, *options], check=True, env=self.environment)
        return path

    def recipe(self, shape: str, method: str) -> Path:
        """Weights of the blocks in 4 bits, groups of 128."""
        file = self.work / f"{shape.replace(' ', '-')}-{method}.json"
        recipe: dict[str, Any] = {
            "name": file.stem,
            "model": str(self.checkpoint(shape)),
            "stages": [{"quantize": {"method": method, "scheme": "W4A16", "group_size": 128}}],
        }
        if method != "rtn":
            recipe["calibration"] = {
                "data": "bundled",
                "samples": SAMPLES,
                "sequence_length": LENGTH,
                "batch_size": SAMPLES,
            }
        file.write_text(json.dumps(recipe))
        return file

    # ------------------------------------------------------------ measuring
    def ours(self, shape: str, method: str, limit: str | None = None, keep: bool = False) -> dict[str, Any]:
        """Plan and run: peaks in MB, what they are of, seconds."""
        name = "-".join([shape, method, *([limit] if limit else [])]).replace(" ", "-")
        output, log = self.work / f"out-{name}", self.work / f"{name}.log"
        arguments = [str(self.recipe(shape, method)), "--output", str(output)]
        arguments += ["--max-memory", limit] if limit else []
        start = [sys.executable, "-m", "compress.cli"]
        planned = subprocess.run(
            [*start, "plan", *arguments, "--json"], env=self.environment, cwd=self.work, capture_output=True, text=True
        )
        plan = json.loads(planned.stdout)
        found: dict[str, Any] = {"shape": shape, "method": method, **({"max_memory": limit} if limit else {})}
        found |= {
            "planned_mb": round(plan["peak_memory"] / 1e6),
            "parts_mb": {key: round(value / 1e6) for key, value in plan["memory"].items()},
            "does": plan["bounds"],
        }
        if "error" in plan:
            return found | {"refused": plan["error"]}
        # What was measured of processes before; the figures of one are lost where this script was killed with it.
        state, going_on = self.work / f"{name}.part.json", (output / ".compress").exists()
        total: dict[str, Any] = {"seconds": 0.0, "peak_mb": 0.0, "processes": 0, "lost": 0}
        if going_on and state.exists():
            total |= json.loads(state.read_text())
        else:
            going_on = False
            shutil.rmtree(output, ignore_errors=True)
        state.write_text(json.dumps(total | {"lost": total["lost"] + 1}))
        load = os.getloadavg()[0]
        command = [*start, "apply", *arguments, *(["--resume"] if going_on else []), "--quiet"]
        run = measure(command, log, self.environment, self.arguments.timeout, cwd=self.work)
        total["seconds"] = round(total["seconds"] + run.seconds, 1)
        total["peak_mb"], total["processes"] = max(total["peak_mb"], run.peak_mb), total["processes"] + 1
        if run.returncode != 0:
            state.write_text(json.dumps(total))
            why = " (time is up; start again to go on)" if run.timed_out else ""
            sys.exit(f"{name}: exit {run.returncode}{why}: {last_error(log)}")
        state.unlink()
        found |= total | {"planned_over_measured": round(found["planned_mb"] / total["peak_mb"], 3)}
        found |= {"cpu_seconds": run.cpu_seconds} if not going_on else {}
        found |= {"load_before": round(load, 1), "commit": commit(), "sha256": digest(output)}
        if not keep:
            shutil.rmtree(output)
        print(
            f"{name}: {found['peak_mb']:.0f} MB, planned {found['planned_mb']} MB, {found['seconds']:.0f} s", flush=True
        )
        return found

    def peer(self, tool: str, shape: str, method: str) -> dict[str, Any]:
        """A peer's peak on the same checkpoint and the same rows; it is stopped where it takes more than the machine may give."""
        model, name = self.checkpoint(shape), f"{tool}-{shape}-{method}".replace(" ", "-")
        ids, config, report, output = (
            self.work / f"{name}.{end}" for end in ("ids.json", "json", "report.json", "out")
        )
        write = [sys.executable, str(HERE / "peers" / "token_ids.py"), "--model", str(model), "--output", str(ids)]
        subprocess.run([*write, "--samples", str(SAMPLES), "--length", str(LENGTH)], check=True, env=self.environment)
        quantize = {"method": method, "bits": 4, "group_size": 128, "symmetric": True}
        cell = {"model": str(model), "calibration": str(ids), "output": str(output), "report": str(report)}
        config.write_text(json.dumps({**cell, "quantize": quantize, "prune": None, "settings": {}}))
        python = self.arguments.peers / tool / "bin" / "python"
        environment = {key: value for key, value in self.environment.items() if key != "PYTHONPATH"}
        command = [sys.executable, str(HERE / "peers" / "stop_above.py"), str(self.arguments.most), "--", str(python)]
        log = self.work / f"{name}.log"
        load = os.getloadavg()[0]
        run = measure(
            [*command, str(HERE / "peers" / f"run_{tool}.py"), "--config", str(config)],
            log,
            environment,
            self.arguments.timeout,
            self.work,
        )
        found = {
            "shape": shape,
            "method": method,
            "peak_mb": run.peak_mb,
            "seconds": run.seconds,
            "load_before": round(load, 1),
        }
        if run.returncode != 0:
            found["stopped"] = "time was up" if run.timed_out else last_error(log)
        elif report.exists():
            found["versions"] = json.loads(report.read_text())["versions"]
        shutil.rmtree(output, ignore_errors=True)
        print(f"{name}: {found}", flush=True)
        return found

    # ------------------------------------------------------------ parts
    def part(self, name: str) -> None:
        """Measure what of a part is not there."""
        if name == "depth":
            for method in ("rtn", "gptq"):
                for shape in ("24 layers", "96 layers"):
                    self.keep(f"depth/{method}/{shape}", lambda s=shape, m=method: self.ours(s, m))  # type: ignore[misc]
        elif name == "limits":
            shape = "2 layers of 7B"
            for limit in (None, *self.arguments.limits):
                self.keep(f"limits/gptq/{limit or 'none'}", lambda limit=limit: self.ours(shape, "gptq", limit))  # type: ignore[misc]
            self.keep("limits/rtn/none", lambda: self.ours(shape, "rtn"))
        elif name in ("rtn7b", "gptq7b"):
            self.keep(name, lambda: self.ours("7B", name.removesuffix("7b"), LIMIT))
        else:
            for tool in ("llmcompressor", "gptqmodel"):
                for shape in self.arguments.peer_shapes:
                    for method in ("rtn", "gptq"):
                        key = f"peers/{tool}/{method}/{shape}"
                        self.keep(key, lambda t=tool, s=shape, m=method: self.peer(t, s, m))  # type: ignore[misc]

    def keep(self, key: str, run: Any) -> None:
        """Run it and write the JSON, unless it is there."""
        if key in self.data and not self.arguments.force:
            return
        found = run()
        # Another invocation may measure another part meanwhile.
        self.data = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        self.data["machine"] = {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": self.arguments.threads,
            "memory_gb": memory_gb(),
        }
        self.data["calibration"] = {"samples": SAMPLES, "sequence_length": LENGTH, "limit_7b": LIMIT}
        self.data[key] = found
        for kind in ("rtn", "gptq"):
            few, many = (self.data.get(f"depth/{kind}/{shape}") for shape in ("24 layers", "96 layers"))
            if few and many:
                self.data[f"depth/{kind}/growth"] = round(many["peak_mb"] / few["peak_mb"] - 1, 4)
        RESULT.write_text(json.dumps(self.data, indent=1) + "\n")


def table(data: dict[str, Any]) -> str:
    """What was measured, in Markdown."""
    lines = ["| run | limit | peak, MB | planned, MB | seconds |", "|---|---|---|---|---|"]
    for key, found in data.items():
        if not isinstance(found, dict) or "shape" not in found:
            continue
        tool = key.split("/")[1] + " " if key.startswith("peers/") else ""
        peak = "refused" if "refused" in found else f"{found['peak_mb']:.0f}"
        peak = f"stopped at {peak}" if "stopped" in found else peak
        done = f", {found['does']}" if found.get("does") else ""
        cells = (
            f"{tool}{found['method']}, {found['shape']}{done}", found.get("max_memory", ""), peak, str(found.get("planned_mb", "")),
            f"{found['seconds']:.0f}" if "seconds" in found else "",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"{key.split('/')[1]}: {data[key]:+.1%} from 24 to 96 layers" for key in data if key.endswith("/growth")]
    return "\n".join(lines)


def digest(output: Path) -> str:
    """SHA-256 over the shards of an artifact."""
    found = hashlib.sha256()
    for file in sorted(output.glob("*.safetensors")):
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 24):
                found.update(chunk)
    return found.hexdigest()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("memory-benchmark"),
        help="scratch directory: checkpoints and outputs, 20 GB for the 7B parts",
    )
    parser.add_argument("--only", default=",".join(PARTS[:-1]), help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument(
        "--limits", type=lambda text: text.split(","), default=["1900MB", "1000MB"], help="of the part `limits`"
    )
    parser.add_argument("--peers", type=Path, help="directory that benchmarks/peers/setup.sh filled")
    parser.add_argument("--peer-shapes", type=lambda text: text.split(","), default=["24 layers", "7B"])
    parser.add_argument("--most", type=float, default=20.0, help="GB of resident memory at which a peer is stopped")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=4 * 3600.0, help="seconds for one run")
    parser.add_argument("--force", action="store_true", help="measure again what is in the JSON already")
    parser.add_argument("--table", action="store_true", help="print what is in the JSON, and measure nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(RESULT.read_text())))
        return
    arguments.work = arguments.work.resolve()
    arguments.work.mkdir(parents=True, exist_ok=True)
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if "peers" in chosen and arguments.peers is None:
        parser.error("--only peers needs --peers")
    bench = Bench(arguments)
    for name in chosen:
        bench.part(name)


if __name__ == "__main__":
    main()
