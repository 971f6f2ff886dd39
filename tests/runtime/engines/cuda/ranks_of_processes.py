"""Run by test_ranks.py with torchrun and TRITON_INTERPRET=1: two ranks with gloo, which write what they have seen to a file each."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from fake_graph import Fake
from triton_interpreter import repair, watch

import runtime
from runtime import kernels as table
from runtime.checkpoint.artifact import Artifact
from runtime.decoding import step
from runtime.engines.base import Chunk
from runtime.engines.blueprint import Blueprint
from runtime.engines.cuda import ops
from runtime.engines.cuda.tensor_parallel import RankBlueprint
from runtime.errors import RequestError
from runtime.kernels.triton.linear import W4A16Triton
from runtime.system.ranks import Ranks


def refused(call: Any) -> str:
    """What a refusal says."""
    try:
        call()
    except RequestError as error:
        return str(error)
    return "nothing was refused"


def in_thread(call: Any) -> Any:
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def generate(path: str, prompts: list[list[int]], new: int, more: bool, kernels: str) -> dict[str, Any]:
    model = runtime.load(path, device="cpu", tensor_parallel=2, kernels=kernels)
    plain: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True}
    draws = plain | {"temperature": 1.0}
    found = {
        "engine": model.engine.description,
        "kernels": model.explain(),
        "heads": [model.engine.parts.heads, model.engine.parts.kv_heads],
        "greedy": model.generate(prompts, **plain),
        "seeded": model.generate(prompts, **draws, top_k=50, seed=[3 + row for row in range(len(prompts))]),
    }
    if not more:  # of kernels that take long to interpret
        return found
    return found | {
        "drawn": model.generate(prompts[:2], **draws),
        "streamed": list(model.stream(prompts[0], **plain)),
        "logits": model.logits(prompts[:1]).view(torch.int32).tolist(),
    }


def refusals(path: str, ranks: Ranks) -> dict[str, str]:
    model = runtime.load(path, device="cpu", tensor_parallel=2)
    mine = [1, 2, 3 + ranks.rank]
    found = {
        "prompts": refused(lambda: model.generate(mine, max_new_tokens=2)),
        "options": refused(lambda: model.generate([1, 2], max_new_tokens=2 + ranks.rank)),
        "scored": refused(lambda: model.score(mine)),
        "one alone": refused(lambda: model.generate([1, 2], max_new_tokens=2 - 2 * ranks.rank)),
        "short": refused(lambda: model.score([1, 2][ranks.rank :])),
        "streamed": refused(lambda: (model.generate, model.stream)[ranks.rank]([1, 2], max_new_tokens=2)),
        "session": refused(model.session),
        "thread": in_thread(lambda: refused(lambda: model.generate([1, 2], max_new_tokens=2))),
        "cancel": refused(lambda: model.generate([1, 2], cancel=threading.Event())),
        "load": refused(
            lambda: runtime.load(path, device="cpu", tensor_parallel=2, kernels=["auto", "reference"][ranks.rank])
        ),
        "cache_memory": refused(
            lambda: runtime.load(path, device="cpu", tensor_parallel=2, cache_memory=["8MB", "9MB"][ranks.rank])
        ),
        "size": refused(lambda: runtime.load(path, device="cpu", tensor_parallel=4)),
    }
    assert len(model.generate([1, 2], max_new_tokens=3, ignore_eos=True)) == 3, "after refusals it goes on"
    return found


def astray(path: str, ranks: Ranks) -> list[list[int]]:
    """Tokens without and with a sampler that goes wrong on rank 1."""
    model = runtime.load(path, device="cpu", tensor_parallel=2)
    found = [model.generate([7, 8, 9], max_new_tokens=3, ignore_eos=True, temperature=1.0, seed=1)]
    sample = step.next_tokens
    step.next_tokens = lambda *given: (sample(*given) + ranks.rank) % 101
    found.append(model.generate([7, 8, 9], max_new_tokens=3, ignore_eos=True, temperature=1.0, seed=1))
    step.next_tokens = sample
    return found


def memories(path: str, ranks: Ranks) -> list[bool]:
    """Whether memory is used again: where both ranks have let go of it, and where one has not."""
    whole = Blueprint(Artifact(path), ranks.device, "reference", None, False)
    which = RankBlueprint(whole, ranks).engine(computing=ops.TORCH, page_size=16)
    pool = which.new_pages(3)
    found, first = [], pool.memory
    del pool
    pool = which.new_pages(2)
    found.append(pool.memory is first)
    held = pool if ranks.rank else None  # as by a cycle that the garbage collector has not come to
    del pool
    second = which.new_pages(2)
    found.append(second.memory is first)
    del held
    return found


def captured(path: str, ranks: Ranks) -> dict[str, Any]:
    """Steps with a stand-in for CUDA graphs: what is in them, and what they compute."""
    fake = Fake()
    whole = Blueprint(Artifact(path), ranks.device, "reference", None, False)
    which = RankBlueprint(whole, ranks).engine(capture=fake, computing=ops.TORCH, page_size=16, buckets=(1, 4))
    pool = which.new_pages(4)
    found = []
    for place, rows in enumerate([1, 3, 2, 1]):
        found.append(which.step(pool, [Chunk([40 + row], place, [row]) for row in range(rows)]))
    calls = [[name for name, *_ in trace.steps if name.startswith("c10d")] for trace in fake.traces]
    return {
        "layers": len(which.parts.blocks),
        "captured": calls,
        "replays": len(fake.replays),
        "logits": [each.view(torch.int32).tolist() for each in found],
    }


def main() -> None:
    repair()
    watch()
    torch.set_num_threads(1)
    asked, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    table.KERNELS = (W4A16Triton("cpu"), *table.KERNELS)  # in the interpreter
    found: dict[str, Any] = {name: generate(**one) for name, one in asked["generate"].items()}
    ranks = Ranks.join(2, torch.device("cpu"))
    found["refused"] = refusals(asked["refuse"], ranks)
    found["captured"] = captured(asked["capture"], ranks)
    found["astray"] = astray(asked["refuse"], ranks)
    found["memories"] = memories(asked["capture"], ranks)
    (output / f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
