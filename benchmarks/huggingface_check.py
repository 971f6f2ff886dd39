"""Exports of the bundled model in Hugging Face layouts, loaded by the engines they are for: do they say what the artifact says?

    python benchmarks/huggingface_check.py --python /venvs/gptqmodel/bin/python [--optimum DIRECTORY] [--work DIRECTORY]

For each case the model is compressed, exported in both layouts and loaded by transformers (with compressed-tensors), by GPTQModel
and, with `--optimum`, by transformers' GPTQ loader; logits and greedy tokens after 64 prompts are compared with `runtime.load` in
float32 and exact mode. GPTQModel's matrices are also multiplied in float32, so that arithmetic is not what differs; `float16` are
the figures of GPTQModel as it runs by itself. Writes results/huggingface_check.json; exits 1 where a reader differs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from where import commit, cpu_name

import compress
import export
from compress.core.resources import recipes_directory
from export.huggingface.gptq import HEAD
from export.huggingface.proof import GptqFolder as Folder
from export.huggingface.proof import compare_model, load_transformers, unpack, verify_with_gptqmodel
from export.huggingface.target import HuggingFaceOptions
from export.run import tool_versions
from export.source import Source
from export.target import Job
from export.verify import Probe, probe
from runtime.errors import CompressError
from runtime.system.progress import ProgressReporter

PROMPTS = 64
BUNDLED = recipes_directory() / "checkpoints" / "stdlib-4m"
RESULT = Path(__file__).parent / "results" / "huggingface_check.json"

GPTQ: dict[str, Any] = {"method": "gptq", "scheme": "W4A16"}
RTN: dict[str, Any] = {"method": "rtn", "scheme": "W4A16", "group_size": 64}
MLP = ["re:.*\\.mlp\\..*"]
ATTENTION = ["re:.*\\.self_attn\\..*"]
# {case: (stages, options of the gptq export; None: it has no such layout)}
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any] | None]] = {
    "w4_g128": ([{"quantize": {**GPTQ, "group_size": 128}}], {}),
    "w4_g32_asymmetric": ([{"quantize": {**GPTQ, "group_size": 32, "symmetric": False}}], {}),
    "w4_g32_asymmetric_v2": (
        [{"quantize": {**GPTQ, "group_size": 32, "symmetric": False}}],
        {"checkpoint_format": "gptq_v2"},
    ),
    "w4_g32_zero_points_of_zero": (
        [{"quantize": {**RTN, "group_size": 32, "symmetric": False}}],
        {},
    ),  # of a changed model
    "w8_channel": ([{"quantize": {**GPTQ, "scheme": "W8A16", "group_size": "channel"}}], {}),
    "w3_g64_widened": ([{"quantize": {**RTN, "scheme": "W3A16"}}], {}),
    "w3_g64_kept": ([{"quantize": {**RTN, "scheme": "W3A16"}}], {"keep_bits": True}),
    "sparse24_w4": ([{"prune": {"method": "magnitude", "pattern": "2:4"}}, {"quantize": RTN}], {}),
    "mlp_only": ([{"quantize": {**RTN, "targets": MLP}}], {}),
    "w4_mlp_w8_attention": (
        [{"quantize": {**RTN, "targets": MLP}}, {"quantize": {**RTN, "scheme": "W8A16", "targets": ATTENTION}}],
        {},
    ),
    "w4_head_too": ([{"quantize": {**RTN, "ignore": []}}], {}),
    "w8a8": ([{"quantize": {"method": "smoothquant", "scheme": "W8A8-INT8"}}], None),
    "fp8": ([{"quantize": {"method": "rtn", "scheme": "FP8_DYNAMIC"}}], None),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="an interpreter that has gptqmodel")
    parser.add_argument("--optimum", help="a directory with optimum, put on its path to run transformers' GPTQ loader")
    parser.add_argument("--work", type=Path, help="where artifacts and exports go (default: a temporary directory)")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        cases = {name: check(name, work, arguments) for name in arguments.cases}
    wrong = [
        f"{name}: {reader}" for name, found in cases.items() for reader, value in found.items() if "error" in value
    ]
    report = {
        "cpu": cpu_name(), "machine": f"{platform.machine()}, Python {platform.python_version()}", "commit": commit(),
        "tools": tool_versions() | {"gptqmodel": version_there(arguments.python)}, "prompts": PROMPTS, "cases": cases,
    }  # fmt: skip
    if RESULT.exists():  # some cases anew
        report["cases"] = {**json.loads(RESULT.read_text(encoding="utf-8"))["cases"], **cases}
    print(json.dumps(report, indent=1))
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(wrong) or "every reader agrees", file=sys.stderr)
    return 1 if wrong else 0


def check(name: str, work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """{reader: metrics, or the error} of one case."""
    stages, gptq = CASES[name]
    artifact = work / name
    if not artifact.exists():
        recipe = {
            "name": name, "model": str(one_sign_model(work) if "of_zero" in name else BUNDLED), "stages": stages,
            "calibration": {"data": "bundled", "samples": 32, "sequence_length": 256, "seed": 0},
        }  # fmt: skip
        compress.apply(recipe, output=artifact, quiet=True)
    reference = probe(Job(Source(artifact), HuggingFaceOptions(), work, ProgressReporter(quiet=True)), PROMPTS)
    folder = written(artifact, layout="compressed-tensors")
    found = {"transformers": timed(lambda: compare_model(reference, load_transformers(folder)))}
    if gptq is not None:
        found |= check_gptq(written(artifact, layout="gptq", **gptq), reference, arguments)
    print(json.dumps({name: found}), file=sys.stderr)
    return found


def check_gptq(folder: Path, reference: Probe, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same for the gptq layout."""
    found = {"gptqmodel": timed(lambda: verify_with_gptqmodel(folder, reference, arguments.python)) | facts(folder)}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    several = any(pattern.startswith("+:") for pattern in config.get("dynamic", {}))
    if arguments.optimum and not several and not config[HEAD]:  # transformers reads neither
        environment = {**os.environ, "PYTHONPATH": arguments.optimum}
        found["transformers_gptq"] = timed(
            lambda: verify_with_gptqmodel(folder, reference, arguments.python, "transformers", environment)
        )
    return found


def one_sign_model(work: Path) -> Path:
    """The bundled model, every 32 columns of a row given one sign at random: the zero point of half the groups is the lowest code.

    What it says is noise, but all readers must say the same noise.
    """
    folder = work / "one_sign"
    if not folder.exists():
        model, chance = load_transformers(BUNDLED, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parts = parameter.data.view(parameter.shape[0], -1, 32)
                signs = torch.randint(0, 2, (*parts.shape[:2], 1), generator=chance).to(parts.dtype) * 2 - 1
                parts.copy_(parts.abs() * signs)
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(BUNDLED / file, folder / file)
    return folder


def written(artifact: Path, layout: str, **options: Any) -> Path:
    """The artifact's export."""
    folder = artifact.with_name(f"{artifact.name}-{layout}")
    export.export(artifact, "huggingface", folder, verify=False, overwrite=True, quiet=True, layout=layout, **options)
    return folder


def timed(run: Any) -> dict[str, Any]:
    start = time.monotonic()
    try:
        metrics = run()
    except CompressError as error:
        return {"error": str(error)}
    return metrics | {"seconds": round(time.monotonic() - start, 1)}


def facts(folder: Path) -> dict[str, Any]:
    """How often the layout's corners are met: reflected groups have negative scales, stored zero points are the lowest they can be."""
    read = Folder(folder)
    groups = negative = 0
    zeros: set[int] = set()
    for module in read.modules:
        scales, qzeros, qweight = (read.get(f"{module}.{part}") for part in ("scales", "qzeros", "qweight"))
        bits = qweight.shape[0] * 32 // read.get(f"{module}.g_idx").shape[0]
        groups += scales.size
        negative += int((scales < 0).sum())
        zeros |= set((unpack(qzeros, bits, scales.shape[1]) + read.zero_offset).flatten().tolist())
    return {
        "groups": groups,
        "negative_scales": negative,
        "smallest_zero_point": min(zeros),
        "largest_zero_point": max(zeros),
    }


def version_there(python: str) -> str:
    import subprocess

    command = [python, "-c", "from importlib.metadata import version; print(version('gptqmodel'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
