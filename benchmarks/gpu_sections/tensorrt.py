"""TensorRT: engines of the bundled model built and verified, then their decoding beside this runtime's on the same artifact."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from gpu_sections.bench import Bench, MissingPeerError, Row, said

RECIPE = "llama_w4_tensorrt"
MOST_KL = 1e-2  # between the engine and the artifact; an export that is wrong is refused long before


def check(bench: Bench) -> None:
    """The export builds an engine, loads it and compares its logits and tokens with the artifact's."""
    installed()
    artifact = bench.artifact(RECIPE)
    for dtype in bench.pick(("float16", "bfloat16"), ("float16",)):
        if not bench.enough(f"an engine in {dtype}", bench.pick(30, 1)):
            continue
        try:
            verification = built(bench, artifact, dtype).verification
            bench.case(f"KL, engine in {dtype}", float(verification.metrics["kl"]), MOST_KL)
        except Exception as error:
            bench.fail(f"an engine in {dtype}: {said(error)}")
            bench.recover()


def timing(bench: Bench) -> None:
    """Tokens a second of greedy decoding, one sequence and eight."""
    import runtime

    installed()
    artifact = bench.artifact(RECIPE)
    for name in ("runtime", "TensorRT"):
        path = artifact if name == "runtime" else bench.work / "tensorrt-float16"
        if not path.exists():
            built(bench, artifact, "float16")
        model = runtime.load(path, device=bench.device)
        for batch in (1, 8):
            row: Row = {"engine": name, "batch": batch, "description": model.engine.description}
            bench.ours(row, "tokens_per_second", lambda m=model, b=batch: speed(bench, m, b))
            bench.add(row)


def installed() -> None:
    """MissingPeerError unless an engine can be built here."""
    from export.tensorrt.build import missing

    reason = missing()
    if reason is not None:
        raise MissingPeerError(reason)


def built(bench: Bench, artifact: Path, dtype: str) -> Any:
    """The verified export."""
    import export

    options = {"dtype": dtype, "require_engine": True, "max_batch": 8, "max_length": 256, "max_prompt": 128}
    return export.export(artifact, "tensorrt", bench.work / f"tensorrt-{dtype}", overwrite=True, quiet=True, **options)


def speed(bench: Bench, model: Any, batch: int) -> float:
    """Tokens a second: the median of rounds."""
    new = bench.pick(96, 4)
    prompts = [[(i + row) % 97 + 2 for i in range(32)] for row in range(batch)]

    def run() -> None:
        model.generate(prompts, max_new_tokens=new, ignore_eos=True)

    run()
    return batch * new / statistics.median(bench.wall(run) for _ in range(bench.pick(5, 1)))
