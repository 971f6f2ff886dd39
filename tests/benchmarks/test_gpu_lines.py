"""Lines of README and docs that a GPU's figures will replace: marked, found, and given sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_sections.summary import DRY, LINES, marked_lines, summary

ROOT = Path(__file__).parents[2]
CONTENT: dict[str, Any] = {
    "dry_run": False, "commit": "abc", "machine": {"device": "NVIDIA H100"},
    "sections": {
        "kernels": {
            "check": {"status": "passed", "facts": {"worst": {"matvec": 2.5e-3}}},
            "timing": {"status": "done", "rows": [
                {"layer": "o", "rows": 1, "w4a16_times_as_fast_as": {"cublas_bf16": 2.5}},
                {"layer": "down", "rows": 1, "w4a16_times_as_fast_as": {"cublas_bf16": 3.25}},
            ]},
        },
        "llama": {
            "check": {"status": "failed", "reason": "wrong numbers", "failed": ["logits, w4: 0.5"]},
            "timing": {"status": "done", "facts": {"shape": "8b"}, "rows": [
                {"engine": "fused w4", "batch": 1, "depth": 512, "step_ms": 4.0, "tokens_per_second": 250.0},
            ]},
        },
        "vllm": {"timing": {"status": "done", "rows": [{"engine": "vllm w4", "batch": 1, "depth": 512, "step_ms": 6.0}],
                            "failed_peers": {"vllm bf16, model": "ValueError: no memory"}}},
        "tensorrt": {"check": {"status": "missing peer", "reason": "TensorRT is not installed"}},
    },
}  # fmt: skip


def test_lines_are_marked() -> None:
    marked = list(marked_lines(ROOT))
    assert {name for _, _, name, _ in marked} == set(LINES), "each mark has a sentence, and each sentence a place"
    assert {Path("README.md"), Path("docs/gpu.md")} <= {path for path, *_ in marked}


def test_every_line_that_says_nothing_ran_is_marked() -> None:
    marked = {(path, number) for path, number, *_ in marked_lines(ROOT)}
    words = (
        "not run on a GPU",
        "not been run on a GPU",
        "not run on hardware",
        "nothing ran on a GPU",
        "has run on a GPU yet",
    )
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if any(each in line for each in words):
                assert (path.relative_to(ROOT), number) in marked, f"{path}:{number}"


def test_the_summary_says_what_to_replace() -> None:
    text = summary(CONTENT, ROOT)
    assert "  kernels, check\n" in text
    assert "  llama, check: wrong numbers\n    logits, w4: 0.5\n" in text
    assert "  tensorrt, check: TensorRT is not installed\n" in text
    assert "peers that failed:\n  vllm, timing, vllm bf16, model: ValueError: no memory\nlines to replace:\n" in text
    assert (
        "8b shape in 4 bits: 1 at depth 512: 250 tokens/s, 1.50x vllm w4; W4A16 products of 1 rows 2.50x to 3.25x cuBLAS"
        in text
    )
    assert "Ran on NVIDIA H100 at commit abc, checks passed: kernels; failed: llama; missing peer: tensorrt." in text
    number = next(n for path, n, name, _ in marked_lines(ROOT) if path == Path("README.md") and name == "status")
    assert f"  README.md:{number}: " in text
    assert DRY not in text


def test_sentences_of_a_dry_run_say_so() -> None:
    text = summary({**CONTENT, "dry_run": True}, ROOT)
    sentences = [line for line in text.splitlines() if line.startswith("    -> ")]
    assert len(sentences) == len(list(marked_lines(ROOT)))
    assert all(DRY in line for line in sentences)
