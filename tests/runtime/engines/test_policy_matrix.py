"""What combines with cache policies in the decoder in C: drafters, batches, shared prefixes, bounds on memory, families."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from inside_cases import SETTINGS, adapter, gentle, with_drafter
from llama_engines import native
from program_families import model_of
from speculation_cases import VOCABULARY, model_over, trees_change_nothing

from runtime.api.model import Model
from runtime.drafting.lengths.fixed import Fixed
from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.engines.torch.engine import TorchEngine
from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import PAGE
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.storage.plan import StoragePlan

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

POLICIES: dict[str, dict[str, Any]] = {
    "int4": {"keys": "int4", "values": "int4", "recent": 64},
    "int8, nothing recent": {"keys": "int8", "values": "int8", "recent": 0},
    "fp8 after four tokens": {"keys": "fp8", "values": "fp8", "recent": 70, "prefix": 4},
    "int2 values": {"keys": "plain", "values": "int2", "recent": 64},
    "quest": {"select": {"method": "quest", "tokens": 100, "skip_layers": 1}},
    "int4 on disk, quest": {
        "keys": "int4",
        "values": "int4",
        "recent": 64,
        "offload": "disk",
        "select": {"method": "quest", "ratio": 0.4, "skip_layers": 0, "recent": 8},
    },
}
EVICTING: dict[str, dict[str, Any]] = {
    "heads that differ, in int4": {
        "keys": "int4", "values": "int4", "recent": 64,
        "evict": {"score": "snapkv", "layers": "pyramid", "heads": "adaptive", "tokens": 150, "interval": 40},
    },
    "h2o of what is generated": {"evict": {"score": "h2o", "tokens": 40, "interval": 24, "prompt": "keep"}},
    "cake": {"evict": {"score": "cake", "layers": "cake", "ratio": 0.4}},
}  # fmt: skip
DRAFTERS: dict[str, Any] = {
    **SETTINGS,
    "lookup": {"method": "lookup"},
    "recycling": {"method": "recycling"},
    "suffix": {"method": "suffix"},
}


@pytest.fixture(scope="module")
def module() -> Any:
    return gentle(head_dim=32, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def draft(module: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An adapter's directory."""
    return str(adapter(tmp_path_factory.mktemp("draft"), module))


def held(module: Any, policy: str) -> Model:
    """The model in C with a policy, with no tokenizer."""
    engine = native(module)
    assert engine.hold(Policy.parse((POLICIES | EVICTING)[policy])) is None
    return model_over(engine)


def texts(count: int, shortest: int = 20, longest: int = 300, seed: int = 0) -> list[list[int]]:
    """Prompts of which some begin alike, beyond a page."""
    draw = random.Random(seed)
    common = [draw.randrange(4, VOCABULARY) for _ in range(150)]
    found = [[draw.randrange(4, VOCABULARY) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]
    return [common + text[:100] if number % 2 else text for number, text in enumerate(found)]


# ---------------------------------------------------------------- policy x batch x sharing x memory
@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_gives_what_each_prompt_gives_alone(module: Any, policy: str) -> None:
    prompts = texts(8)
    alone = [held(module, policy).generate(prompt, max_new_tokens=90) for prompt in prompts]
    model = held(module, policy)
    assert model.generate(prompts, max_new_tokens=90) == alone
    for prompt, expected in zip(prompts, alone, strict=True):  # once more, on the pages of the first call
        assert model.generate(prompt, max_new_tokens=90) == expected
    # Without recent tokens a page that another goes on after is not plain any more where its first has gone on long enough.
    assert model.stats["shared_prompt_tokens"] > 0 or "nothing recent" in policy


@pytest.mark.sampled(6, 5)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("spare", [0, 7, 30])
def test_within_any_memory_the_same(module: Any, policy: str, spare: int) -> None:
    prompts = texts(6, seed=1)
    model = held(module, policy)
    engine = model.engine
    wanted = [held(module, policy).generate(prompt, max_new_tokens=80) for prompt in prompts]
    longest = -(-(max(map(len, prompts)) + 79) // PAGE)
    memory = (longest + sum(engine.overhead) + spare) * engine.page_bytes
    assert model.generate(prompts, max_new_tokens=80, cache_memory=memory) == wanted
    assert model.stats["cache_bytes"] <= memory


def test_what_ended_calls_leave_stays_within_its_bound(module: Any) -> None:
    engine = native(module)
    engine.hold(Policy.parse(POLICIES["int4"]))
    bound = 12 * sum(tensor[0].nbytes for tensor in engine.new_pages(1).tensors)
    model = model_over(engine, prefix_cache=bound)
    prompts = texts(12, 130, 200, seed=2)
    expected = {}
    for prompt in prompts * 2:  # of an old one nothing is left, or what was stored and can be begun after
        found = model.generate(prompt, max_new_tokens=12)
        assert expected.setdefault(tuple(prompt), found) == found
    batch = model._scheduler.batch  # type: ignore[union-attr]
    if batch.pages is not None:
        place = sum(tensor[0].nbytes for tensor in batch.pool.tensors)
        assert batch.pages.touched * engine.page_bytes + batch.pool.plain.most * place <= bound


# ---------------------------------------------------------------- policy x drafter
@pytest.mark.sampled(15, 10)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafters_write_what_plain_decoding_writes(module: Any, draft: str, kind: str, policy: str) -> None:
    prompts = texts(4, seed=3)
    expected = held(module, policy).generate(prompts, max_new_tokens=100)
    model = held(module, policy)
    settings = {**DRAFTERS[kind], **({"model": draft} if kind == "kangaroo" else {})}
    with_drafter(model, settings, lengths=Fixed(depth=5, nodes=5))
    assert model.generate(prompts, max_new_tokens=100) == expected
    assert "off" not in model.stats["drafter"]
    assert model.stats["drafted_tokens"] > 0


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("kind", ["lookup", "recycling", "suffix"])
def test_drafters_write_what_is_written_while_tokens_leave(module: Any, kind: str, policy: str) -> None:
    prompts = texts(4, seed=6)
    expected = held(module, policy).generate(prompts, max_new_tokens=100)
    model = held(module, policy)
    with_drafter(model, DRAFTERS[kind], lengths=Fixed(depth=5, nodes=5))
    assert model.generate(prompts, max_new_tokens=100) == expected
    assert model.stats["drafted_tokens"] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_trees_that_are_often_wrong_change_nothing(module: Any, policy: str) -> None:
    trees_change_nothing(lambda: held(module, policy), texts(3, seed=4), 120)


# ---------------------------------------------------------------- policy x family
_LATENT = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}
FAMILY: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 32}, "Qwen2": {"head_dim": 16}, "Qwen3": {"head_dim": 32}, "Gemma2": {"head_dim": 32},
    "Gemma3": {"head_dim": 32}, "Granite": {"head_dim": 16}, "GPTNeoX": {}, "Cohere2": {"head_dim": 16}, "GptOss": {"head_dim": 32},
    "Mixtral": {"head_dim": 32}, "DeepseekV3": _LATENT,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILY)
def test_logits_of_families_are_those_of_modules_with_the_policy(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoragePlan, "chunk", PAGE)  # modules store 32 tokens at a time, pages here have 64
    policy = Policy.parse(POLICIES["int4"])
    model = model_of(family, **FAMILY[family])
    text = torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    lean = native(model)
    assert lean.hold(policy) is None
    found = lean.read(lean.new_pages(4), [Chunk(text, 0, range(4))], every=True)
    windows = [name for name in lean.explain() if name.startswith("kv_cache")]
    assert len(windows) == (1 if family in ("Qwen2", "Gemma2", "Gemma3", "Cohere2", "GptOss") else 2)
    plain = lean.logits(torch.tensor([text]))[0]
    assert float((found - plain).norm() / plain.norm()) > 1e-4, "the policy does something"
    if family in ("GptOss", "DeepseekV3"):  # modules have no compressed cache of sinks, nor of latent attention
        assert float((found - plain).norm() / plain.norm()) < 0.3
        return
    modules = TorchEngine(model, torch.device("cpu"))
    modules.compress_cache(policy)
    cache = modules.new_cache()
    expected = [modules.forward(torch.tensor([[token]]), cache, None, None)[0, -1] for token in text]
    wanted = torch.stack(expected)
    assert float((found - wanted).norm() / wanted.norm()) < 5e-3


@pytest.mark.parametrize("family", [name for name in FAMILY if name not in ("GptOss", "DeepseekV3")])
def test_families_write_what_modules_write_with_uneven_budgets(family: str) -> None:
    policy = Policy.parse(
        {"evict": {"score": "snapkv", "layers": "pyramid", "heads": "adaptive", "ratio": 0.4, "interval": 20}}
    )
    model = model_of(family, **FAMILY[family])
    prompts = [[token % 300 for token in prompt[:190]] for prompt in texts(3, seed=8)]
    lean, modules = native(model), TorchEngine(model, torch.device("cpu"))
    assert lean.hold(policy) is None
    modules.compress_cache(policy)
    found = model_over(lean).generate(prompts, max_new_tokens=60, ignore_eos=True)
    slow = model_over(modules)
    assert found == [slow.generate(prompt, max_new_tokens=60, ignore_eos=True) for prompt in prompts]


def test_a_model_whose_heads_do_not_fit_says_so() -> None:
    lean = native(model_of("Glm"))
    assert "heads are of 12 channels" in (lean.hold(Policy.parse(POLICIES["int4"])) or "")
    assert isinstance(lean, NativeEngine)
    assert lean.policy is None
