"""Hostile files that atheris finds by the branches they reach: headers, indexes, manifests, recipes and cache policies.

    pip install atheris
    python benchmarks/fuzz_atheris.py [--runs 100000] [--output benchmarks/results/fuzz.json]

Each kind runs in a process of its own, at most 2 GB large, an input at most 10 seconds. What is no `CompressError` ends it, and fails. The
counts are added to what `benchmarks/fuzz.py` has written under "atheris".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
KINDS = ("header", "index", "manifest", "recipe", "policy")


def child(kind: str, runs: int) -> None:
    """Fuzz one kind in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["runtime", "compress"]):
        from compress.recipe import load
        from runtime.checkpoint.artifact import Artifact
        from runtime.checkpoint.checkpoint import Checkpoint, read_json
        from runtime.checkpoint.headers import read_header
        from runtime.errors import CompressError
        from runtime.kv_cache.policy.policy import Policy
    import torch
    from safetensors.torch import save_file

    room = Path(tempfile.mkdtemp(prefix="compress-atheris-"))
    os.chdir(room)
    (room / "config.json").write_text("{}")
    if kind in ("index", "manifest"):
        save_file({"a": torch.ones(2)}, room / ("model.safetensors" if kind == "manifest" else "one.safetensors"))
    reads: dict[str, tuple[str, Any]] = {
        "header": ("x.safetensors", read_header),
        "index": ("model.safetensors.index.json", lambda file: Checkpoint(room)),
        "manifest": ("compress.json", lambda file: Artifact(room).verify()),
        "recipe": ("recipe.yaml", load),
        "policy": ("policy.json", lambda file: Policy.parse(read_json(file))),
    }
    name, read = reads[kind]

    def one(data: bytes) -> None:
        if kind == "header" and len(data) > 8:  # else hardly any length would be right
            data = (len(data) - 16).to_bytes(8, "little", signed=True) + data[8:] if data[0] % 2 else data
        (room / name).write_bytes(data)
        try:
            read(room / name)
        except CompressError as error:
            if not str(error).strip():
                raise AssertionError("no sentence") from error

    corpus = room / "corpus"
    corpus.mkdir()
    for number, text in enumerate(_seeds()):
        (corpus / str(number)).write_bytes(text)
    limits = [
        "-rss_limit_mb=2000",
        "-timeout=10",
        "-max_len=4096",
        f"-runs={runs}",
        "-verbosity=1",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={room}/", str(corpus)], one)
    atheris.Fuzz()


def _seeds() -> list[bytes]:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    return [
        len(header).to_bytes(8, "little") + header + b"\0" * 8,
        b'{"metadata": {}, "weight_map": {"a": "one.safetensors"}}',
        b'{"schema_version": 1, "tensors": {"a": {"action": "copied"}}, "files": {"x": {"bytes": 1, "sha256": "'
        + b"0" * 64
        + b'"}}}',
        b"name: x\nmodel: y\nstages:\n  - quantize: {method: rtn, bits: 4, group_size: 32}\n",
        b'{"keys": "int4", "values": "int4", "recent": 16, "evict": {"method": "h2o", "budget": 64}}',
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.kind is not None:
        child(options.kind, options.runs)
        return 0
    found: dict[str, Any] = {}
    for kind in KINDS:
        command = [sys.executable, __file__, "--kind", kind, "--runs", str(options.runs)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
        runs = re.findall(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
        covered = re.findall(r"cov: (\d+)", done.stderr)
        found[kind] = {
            "inputs": int(runs[-1]) if runs else 0,
            "edges": int(covered[-1]) if covered else 0,
            "wrong": int(done.returncode != 0),
        }
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
    if options.output is not None:
        whole = json.loads(options.output.read_text(encoding="utf-8")) if options.output.is_file() else {}
        options.output.write_text(json.dumps({**whole, "atheris": found}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 1 if any(kind["wrong"] for kind in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
