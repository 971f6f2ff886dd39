"""Drafts: chains that the fused engine verifies, beside single steps; and drafters on the bundled model, whose text is real."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import torch

from compress.evaluate.drafters import decode
from gpu_sections.bench import Bench, Row
from gpu_sections.llama import SHAPES, chosen_shape, decode_ms, dense_model, lean, pack
from runtime.engines.base import Chunk, Engine

LENGTHS = (2, 4, 8, 16)  # tokens verified at once
FREE = ("lookup", "suffix")  # drafters without weights
RECIPE = "llama_w4"
TEXT = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints" / "texts" / "heldout.txt"
TIES = 0.25  # of the texts may differ: a step of several rows rounds differently, so a tie may fall the other way


def check(bench: Bench) -> None:
    """Logits of verified chains against single steps, and texts with a drafter against texts without."""
    shape = SHAPES[bench.pick("1b", "tiny")] | bench.pick({"num_hidden_layers": 2}, {})
    model = dense_model(shape, bench.device)
    pack(model)
    engine = lean(model, bench, True)
    ids = random.Random(1).choices(range(512), k=bench.pick(80, 20))
    pool, start = engine.new_pages(4), len(ids) - 8
    engine.step(pool, [Chunk(ids[:start], 0, [1, 0])])
    single = [engine.step(pool, [Chunk([token], start + i, [1, 0])])[0] for i, token in enumerate(ids[start:])]
    engine.step(pool, [Chunk(ids[:start], 0, [3, 2])])
    chain = engine.verify(pool, [Chunk(ids[start:], start, [3, 2], outputs=8)])[0].float()
    wanted = torch.stack(single).float()
    bench.case("logits, a chain of 8", float((chain - wanted).norm() / wanted.norm()), 0.05)
    del engine, model
    bench.recover()
    plain, prompts = loaded(bench, False), texts(bench)
    expected = decode(plain, prompts, bench.pick(48, 4), 1)[0]
    for drafter in FREE[: bench.pick(2, 1)]:
        found = decode(loaded(bench, drafter), prompts, bench.pick(48, 4), 1)[0]
        differing = sum(a != b for a, b in zip(found, expected, strict=True))
        bench.case(f"texts, {drafter}", differing / len(prompts), TIES)


def timing(bench: Bench) -> None:
    """Cost of a verification in steps, by length and batch; tokens a second with drafters."""
    model = dense_model(SHAPES[chosen_shape(bench)], bench.device)
    bench.fact(kernels=pack(model))
    engine = lean(model, bench, True)
    verification(bench, engine)
    del engine, model
    bench.recover()
    prompts = texts(bench)
    for drafter in (False, *FREE[: bench.pick(2, 1)]):
        if bench.enough(f"bundled model, {drafter or 'no drafts'}", bench.pick(10, 1)):
            row = {"model": "bundled, 4M weights", "drafter": drafter or "none"}
            bench.ours(row, "tokens_per_second", lambda d=drafter, r=row: bundled_speed(bench, d, prompts, r))
            bench.add(row)


def verification(bench: Bench, engine: Engine) -> None:
    """Milliseconds of steps that verify so many tokens of each sequence."""
    for batch in bench.pick((1, 8), (1,)):
        depth, row = bench.pick(512, 8), Row(batch=batch)
        if not bench.enough(f"verification, batch {batch}", bench.pick(10, 1)):
            continue
        bench.ours(row, "step_ms", lambda b=batch, d=depth: decode_ms(bench, engine, b, d, {}))
        for length in LENGTHS[: bench.pick(4, 1)]:
            bench.ours(
                row, f"verify_{length}_ms", lambda b=batch, d=depth, n=length: decode_ms(bench, engine, b, d, {}, n)
            )
        bench.add(row)


def loaded(bench: Bench, drafter: str | bool) -> Any:
    """The bundled model in 4 bits, with a drafter that always proposes, or none."""
    import runtime

    settings = {"method": drafter, "lengths": {"fixed": {"depth": 5, "nodes": 5}}} if drafter else False
    return runtime.load(bench.artifact(RECIPE), device=bench.device, drafter=settings)


def texts(bench: Bench) -> list[list[int]]:
    """Prompts of 64 tokens of held-out text."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(bench.artifact(RECIPE))(TEXT.read_text(encoding="utf-8")[:20000])["input_ids"]
    return [ids[start : start + 64] for start in range(0, 64 * bench.pick(16, 2), 64)]


def bundled_speed(bench: Bench, drafter: str | bool, prompts: list[list[int]], row: Row) -> float:
    """Tokens a second, one sequence at a time: the median of rounds. `row` gets what was accepted."""
    model, new, rates = loaded(bench, drafter), bench.pick(128, 4), []
    for _ in range(bench.pick(4, 2)):  # the first compiles and captures
        _, taken = decode(model, prompts[:4], new, 1)
        rates.append(taken.new_tokens / taken.decode_seconds)
    row |= {"drafted_tokens": taken.drafted_tokens, "accepted_tokens": taken.accepted_tokens}
    return statistics.median(rates[1:])
