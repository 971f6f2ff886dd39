"""Two processes, joined by gloo, their kernels in Triton's interpreter, give the tokens of one."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_models import build
from random_models import UNLIMITED
from warm_python import torchrun
from weight_cases import int_scheme, write_checkpoint

import runtime
from runtime.api.model import Model
from runtime.checkpoint.artifact import Artifact
from runtime.engines.blueprint import Blueprint
from runtime.engines.cuda import CudaEngine
from runtime.engines.llama_structure import Program, read_program

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # all of it is one launch of two processes
HERE = Path(__file__).parent
NEW = 3
FULL = ("dense", "one head for all")
KERNELS = {"permuted": "reference"}  # interpreted ones take long
#: Family, changes of its config, dtype, and bits of the linear layers in groups of 32; (): see `permuted`.
MODELS: dict[str, Any] = {
    "W4A16": ("Qwen2", {"num_hidden_layers": 1, "hidden_size": 32}, torch.bfloat16, 4),
    "dense": ("Llama", {"mlp_bias": True, "attention_bias": True}, torch.bfloat16, None),
    "one head for all": ("Llama, one head for all", {"tie_word_embeddings": True}, torch.float32, None),
    "permuted": (),
}


def save(directory: Path, name: str, changes: dict[str, Any], dtype: torch.dtype, bits: int | None) -> Path:
    directory.mkdir()
    model = build(name, **changes).to(dtype)
    layers = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    if bits is None:
        model.save_pretrained(directory)
    else:
        write_checkpoint(directory, model, dict.fromkeys(layers, int_scheme(bits, False, 32)), dtype)
    return directory


def alone(path: Path) -> Model:
    """One process with the same engine, in plain torch."""
    engine = Blueprint(Artifact(path), torch.device("cpu"), "reference", None, False).build()
    program = read_program(engine.module, fuse=True)
    assert isinstance(program, Program)
    return Model(CudaEngine(engine, program), None, Artifact(path), frozenset())


def decisive(model: Model) -> list[list[int]]:
    """Ragged prompts whose greedy tokens do not hang on how sums are rounded: no second best is near any of them."""
    draw = random.Random(7)
    every = [draw.choices(range(101), k=draw.randint(1, 7)) for _ in range(60)]
    chosen = []
    for ids, new in zip(every, model.generate(every, max_new_tokens=NEW, ignore_eos=True), strict=True):
        best = model.logits([[*ids, *new]])[0, len(ids) - 1 : -1].topk(2).values
        spread = float(model.logits([ids])[0, -1].std())
        if float((best[:, 0] - best[:, 1]).min()) > 0.1 * spread:
            chosen.append(ids)
    assert len({len(ids) for ids in chosen}) >= 3, "prompts are not ragged"
    chosen.sort(key=len)
    return [chosen[0], chosen[len(chosen) // 2], chosen[-1]]


def permuted(model: Path, text: Path, output: Path) -> Path:
    """A W4A16 artifact whose channels are in the order of their activation energy."""
    import compress

    data = {"data": str(text), "samples": 4, "sequence_length": 64}
    quantize = {"method": "gptq", "scheme": "W4A16", "group_size": 32, "order": "natural", "ignore": ["lm_head"]}
    stages = [{"permute": {"method": "activation"}}, {"quantize": quantize}]
    recipe = {"name": "permuted", "model": str(model), "stages": stages, "calibration": data}
    return compress.apply({**recipe, "evaluate": {**data, **UNLIMITED}}, output=output, quiet=True).path


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any, tiny_text: Path
) -> dict[str, tuple[Model, Path, list[list[int]]]]:
    """{name: in one process, directory, prompts}."""
    home, found = tmp_path_factory.mktemp("ranks"), {}
    for name, model in MODELS.items():
        path = save(home / name, *model) if model else permuted(tiny_llama(), tiny_text, home / name)
        one = alone(path)
        found[name] = (one, path, decisive(one))
    return found


@pytest.fixture(scope="module")
def ranks(
    models: dict[str, tuple[Model, Path, list[list[int]]]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each of two processes has seen (`ranks_of_processes.py`)."""
    output = tmp_path_factory.mktemp("output")
    dense = str(models["dense"][1])
    asked = {
        name: {
            "path": str(path),
            "prompts": prompts,
            "new": NEW,
            "more": name in FULL,
            "kernels": KERNELS.get(name, "auto"),
        }
        for name, (_, path, prompts) in models.items()
    }
    (output / "asked.json").write_text(json.dumps({"generate": asked, "refuse": dense, "capture": dense}))
    paths = os.pathsep.join([str(HERE), str(HERE.parents[3] / "benchmarks"), *filter(None, sys.path)])
    arguments = [HERE / "ranks_of_processes.py", output / "asked.json", output]
    done = torchrun(2, *arguments, interpret=True, PYTHONPATH=paths)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_give_the_tokens_of_one(name: str, models: Any, ranks: list[dict[str, Any]]) -> None:
    one, _, prompts = models[name]
    for rank, every in enumerate(ranks):
        found = every[name]
        assert found["engine"].startswith("fused decoder, triton kernels")
        assert f"rank {rank} of 2" in found["engine"]
        heads = one.engine.parts  # type: ignore[attr-defined]
        assert found["heads"] == [heads.heads // 2, heads.kv_heads // 2 or 1]
        assert found["greedy"] == one.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
        assert found.get("streamed", found["greedy"][0]) == found["greedy"][0]
    if name == "W4A16":
        assert "triton" in ranks[0][name]["kernels"]["model.layers.0.mlp.down_proj"]


def test_they_give_those_of_another_engine(models: Any, ranks: list[dict[str, Any]]) -> None:
    """What `runtime.load` runs on this CPU, greedy and with draws from the same seeds."""
    _, path, prompts = models["one head for all"]
    other = runtime.load(path, device="cpu")
    assert "rank" not in other.engine.description
    assert ranks[0]["one head for all"]["greedy"] == other.generate(prompts, max_new_tokens=NEW, ignore_eos=True)


@pytest.mark.parametrize("name", MODELS)
def test_draws_from_seeds_are_those_of_one_process(name: str, models: Any, ranks: list[dict[str, Any]]) -> None:
    one, _, prompts = models[name]
    seeds = [3 + row for row in range(len(prompts))]
    wanted = one.generate(prompts, max_new_tokens=NEW, ignore_eos=True, temperature=1.0, top_k=50, seed=seeds)
    assert ranks[0][name]["seeded"] == ranks[1][name]["seeded"]
    if name == "one head for all":  # of others, numbers near the border of two tokens may fall on either side
        assert ranks[0][name]["seeded"] == wanted


@pytest.mark.parametrize("name", FULL)
def test_ranks_agree_to_the_bit(name: str, ranks: list[dict[str, Any]]) -> None:
    """Logits, and draws for which nobody gave a seed."""
    first, second = (every[name] for every in ranks)
    assert first["logits"] == second["logits"]
    assert first["drawn"] == second["drawn"]
    assert first["drawn"] != first["greedy"][:2]


def test_all_reduces_are_in_the_captured_step(ranks: list[dict[str, Any]]) -> None:
    for every in ranks:
        found = every["captured"]
        assert len(found["captured"]) == 2, "a bucket of 1 and one of 4"
        for calls in found["captured"]:
            assert sum("allreduce" in name for name in calls) == 2 * found["layers"]
            assert sum("allgather" in name for name in calls) == 1
            assert len(calls) == 2 * found["layers"] + 1
            assert "allgather" in calls[-1]
        assert found["replays"] == 4
    assert ranks[0]["captured"]["logits"] == ranks[1]["captured"]["logits"]


def test_tokens_are_those_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    """On GPUs samplers may differ in the last bits: here that of rank 1 always does."""
    for every in ranks:
        right, wrong = every["astray"]
        assert right == wrong == ranks[0]["astray"][0]


def test_memory_is_used_again_by_all_or_none(ranks: list[dict[str, Any]]) -> None:
    assert [every["memories"] for every in ranks] == [[True, False]] * 2


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("prompts", "rank 1 is not that of rank 0"),
        ("options", "rank 1 is not that of rank 0"),
        ("scored", "token ids of rank 1"),
        ("one alone", "max_new_tokens"),
        ("short", "at least two tokens"),
        ("streamed", "rank 1 is not that of rank 0"),
        ("session", "forget one at different times"),
        ("cache_memory", "what is loaded of rank 1"),
        ("thread", "one thread"),
        ("cancel", "cancel"),
        ("load", "what is loaded of rank 1"),
        ("size", "takes 4 processes, and torch.distributed joins 2"),
    ],
)
def test_what_would_make_ranks_wait_for_ever_is_refused(what: str, word: str, ranks: list[dict[str, Any]]) -> None:
    """On both ranks, so that both go on."""
    for every in ranks:
        assert word in every["refused"][what]
