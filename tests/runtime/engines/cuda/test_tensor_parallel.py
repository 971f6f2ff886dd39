"""Parts of a model on several ranks compute what the whole does; ranks that are threads stand in for processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_models import build
from thread_ranks import ThreadRanks, on_all
from weight_cases import int_scheme, write_checkpoint

import runtime
from runtime.checkpoint.artifact import Artifact
from runtime.engines.base import Chunk
from runtime.engines.blueprint import Blueprint
from runtime.engines.cuda import CudaEngine
from runtime.engines.cuda.tensor_parallel import RankBlueprint, heads_of_ranks, spread
from runtime.engines.llama_structure import Program, read_program
from runtime.errors import RequestError
from runtime.formats.grid import GridScheme
from runtime.formats.scheme import Scheme

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 2, 77, 31, 8], [4] * 20, [100]]


def blueprint(path: Path, scheme: str | None = None) -> Blueprint:
    artifact = Artifact(path)
    if scheme is not None:
        from runtime.layers.rounding import round_artifact

        artifact = round_artifact(artifact, scheme, False)
    return Blueprint(artifact, CPU, "reference", None, False)


def alone(path: Path, **options: Any) -> CudaEngine:
    engine = blueprint(path, **options).build()
    program = read_program(engine.module, fuse=True)
    assert isinstance(program, Program), program
    return CudaEngine(engine, program, page_size=16)


def together(path: Path, size: int, **options: Any) -> list[CudaEngine]:
    found: Sequence[Any] = ThreadRanks.make(size)
    return [RankBlueprint(blueprint(path, **options), ranks).engine(page_size=16) for ranks in found]


def logits(which: CudaEngine) -> torch.Tensor:
    """Of ragged prompts and of two steps each: four passes, since the prompt of one token is decoded beside the others."""
    pool = which.new_pages(8)
    pages = [[2 * row, 2 * row + 1] for row in range(len(PROMPTS))]
    found = [which.step(pool, [Chunk(ids, 0, table) for ids, table in zip(PROMPTS, pages, strict=True)])]
    for step in range(2):
        chunks = [Chunk([7 + step], len(ids) + step, table) for ids, table in zip(PROMPTS, pages, strict=True)]
        found.append(which.step(pool, chunks))
    return torch.cat(found)


def save(directory: Path, name: str, scheme: Scheme | None = None, head: Scheme | None = None, **changes: Any) -> Path:
    """A checkpoint of a random model of the family, its linear layers in a scheme."""
    model = build(name, **changes)
    layers = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    schemes = {} if scheme is None else dict.fromkeys(layers, scheme)
    if head is not None:
        schemes["lm_head"] = head
    if schemes:
        write_checkpoint(directory, model, schemes, torch.float32)
    else:
        model.save_pretrained(directory)
    return directory


INT4 = int_scheme(4, False, 32)
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "GQA": (2, {"name": "Llama"}),
    "a copy of a head each": (4, {"name": "Llama"}),
    "one head for all, biases": (2, {"name": "Llama, one head for all"}),
    "8 ranks": (8, {"name": "Llama", "num_attention_heads": 8, "head_dim": 8, "num_key_value_heads": 4}),
    "3 ranks": (3, {"name": "Qwen3", **SIX_HEADS, "intermediate_size": 100}),
    "tied": (2, {"name": "Qwen2", "tie_word_embeddings": True}),
    "window": (2, {"name": "Mistral, window"}),
    "biases of the MLP": (2, {"name": "Llama", "mlp_bias": True, "attention_bias": True}),
    "int4 g32, uneven channels": (2, {"name": "Qwen2", "scheme": INT4}),
    "int4 g32, a group a rank": (3, {"name": "Llama", "scheme": INT4, **SIX_HEADS, "head_dim": 32}),
    "int4 head": (2, {"name": "Llama", "scheme": INT4, "head": int_scheme(4, False, 32), "vocab_size": 109}),
    "int3 channel": (2, {"name": "Llama", "scheme": int_scheme(3, True, "channel"), "head_dim": 32}),
    "int8 channel": (2, {"name": "Llama", "scheme": int_scheme(8, False, "channel")}),
    "float8": (2, {"name": "Qwen3", "scheme": Scheme(GridScheme(8, "float", True, "channel"))}),
    "2:4": (2, {"name": "Llama", "scheme": int_scheme(4, True, 32, sparsity="2:4")}),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", MODELS)
def test_ranks_compute_what_one_does(case: str, tmp_path: Path) -> None:
    size, model = MODELS[case]
    path = save(tmp_path, **model)
    one, every = alone(path), together(path, size)
    wanted = logits(one)
    found = on_all([lambda which=which: logits(which) for which in every])
    for each in found:
        assert torch.equal(each, found[0]), "ranks see different logits"
        torch.testing.assert_close(each, wanted, rtol=2e-4, atol=2e-4)
    layers = len(one.parts.blocks)
    assert {which.ranks.sums for which in every} == {2 * layers * 4}  # type: ignore[union-attr]


def test_weights_that_are_rounded_while_they_are_read(tmp_path: Path) -> None:
    """Every rank has the codes and scales of the whole."""
    path = save(tmp_path, "Llama")
    wanted = logits(alone(path, scheme="W8A16"))
    for each in on_all([lambda which=which: logits(which) for which in together(path, 2, scheme="W8A16")]):
        torch.testing.assert_close(each, wanted, rtol=2e-4, atol=2e-4)


def test_a_rank_holds_its_share(tmp_path: Path) -> None:
    path = save(tmp_path, "Llama", INT4, num_hidden_layers=4)
    one, every = alone(path), together(path, 2)
    embedding = 101 * 64 * 4
    shares = [which.weight_bytes - embedding for which in every]
    whole = one.weight_bytes - embedding
    # Norms, scales that all have, and what one more row or group takes.
    assert all(share < 0.6 * whole for share in shares)
    assert whole <= sum(shares) < 1.05 * whole
    assert {which.page_bytes for which in every} == {one.page_bytes // 2}
    assert {which.logits_width for which in every} == {101}
    assert every[1].description.endswith("rank 1 of 2")


# ---------------------------------------------------------------- who has what
def test_heads_of_ranks() -> None:
    assert heads_of_ranks(8, 4, 2) == ([(0, 4), (4, 8)], [(0, 2), (2, 4)])
    assert heads_of_ranks(8, 2, 4) == ([(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)])
    for heads, kv_heads, size in [(32, 8, 2), (32, 8, 4), (32, 8, 8), (28, 4, 4), (16, 2, 8), (12, 1, 6), (6, 3, 3)]:
        queries, keys = heads_of_ranks(heads, kv_heads, size)
        group = heads // kv_heads
        for (first, end), (key, last) in zip(queries, keys, strict=True):
            own = [head // group for head in range(first, end)]
            assert sorted(set(own)) == list(range(key, last)), "a query head without its keys, or keys without one"
            here = (end - first) // (last - key)  # as the rank's own program counts groups
            assert own == [key + place // here for place in range(end - first)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "allowed"),
    [(6, 2, 4, "2, 6"), (9, 3, 2, "3"), (5, 5, 2, "5"), (1, 1, 2, "not be cut")],
)
def test_heads_that_do_not_divide(heads: int, kv_heads: int, size: int, allowed: str) -> None:
    with pytest.raises(RequestError, match=f"{heads} query heads and {kv_heads} .*{size} ranks.*{allowed}"):
        heads_of_ranks(heads, kv_heads, size)


def test_channels_are_spread_by_whole_groups() -> None:
    draw = random.Random(3)
    for _ in range(200):
        step, size = draw.randint(1, 150), draw.randint(2, 8)
        total = draw.randint(step * (size - 1) + 1, step * size * 5)
        bounds = spread(total, step, size, "")
        assert [first for first, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
        assert (bounds[0][0], bounds[-1][1]) == (0, total)
        assert all(first % step == 0 and first < end for first, end in bounds)
        assert max(end - first for first, end in bounds) - min(end - first for first, end in bounds[:-1]) <= step
    assert spread(11008, 1, 4, "") == [(0, 2752), (2752, 5504), (5504, 8256), (8256, 11008)]
    assert [end - first for first, end in spread(11008, 128, 4, "")] == [2688, 2816, 2688, 2816]
    assert all(end % 64 == 0 for _, end in spread(11008, 1, 3, ""))
    with pytest.raises(RequestError, match="64 channels are 2 groups of 32"):
        spread(64, 32, 3, "channels")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [
        ({"name": "Llama"}, 3, "4 query heads and 2 key/value heads .* 3 ranks; it can be cut among 2, 4"),
        ({"name": "Llama", "scheme": int_scheme(4, True, 64)}, 2, r"o_proj: columns 0 to 63 are stored together"),
        ({"name": "Llama", "scheme": int_scheme(4, True, 48), "head_dim": 48}, 4, "96 channels of .*down_proj are 2 groups of 48"),
        ({"name": "Llama", "scheme": Scheme(None, None, "unstructured")}, 2, "_proj: format bitmap cannot be cut"),
        ({"name": "Llama", "head": Scheme(None, None, "unstructured")}, 2, "lm_head: format bitmap cannot be cut"),
        ({"name": "Llama", "hidden_act": "gelu"}, 2, "gelu"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_cut(model: dict[str, Any], size: int, said: str, tmp_path: Path) -> None:
    path = save(tmp_path, **model)
    with pytest.raises(RequestError, match=f"tensor_parallel.*{said}"):
        together(path, size)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has started this process."""
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_memory": "4GB"}, "max_memory"),
        ({"kv_cache": "kivi"}, "kv_cache"),
        ({"drafter": "lookup"}, "drafter"),
        ({"tensor_parallel": 9}, "tensor_parallel"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"tensor_parallel": True}, "tensor_parallel"),
        ({"device": "meta"}, "meta"),
        ({}, "torchrun --nproc-per-node 2"),
    ],
)
def test_options_that_do_not_go_with_it(
    options: dict[str, Any], word: str, tiny_llama: Callable[..., Path], nobody: None
) -> None:
    with pytest.raises(RequestError, match=word):
        runtime.load(tiny_llama(), **{"device": "cpu", "tensor_parallel": 2, **options})


def test_an_artifact_with_a_draft_says_how_it_loads(
    tiny_llama: Callable[..., Path], tmp_path: Path, nobody: None
) -> None:
    import shutil

    from runtime.drafting.config.artifact_draft import CHOICE

    path = Path(shutil.copytree(tiny_llama(), tmp_path / "with"))
    (path / CHOICE).write_text('{"method": "lookup"}')
    with pytest.raises(RequestError, match="drafter=False"):
        runtime.load(path, device="cpu", tensor_parallel=2)


def test_other_launchers_sizes(tiny_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match="takes 2 processes, and 4"):
        runtime.load(tiny_llama(), device="cpu", tensor_parallel=2)
