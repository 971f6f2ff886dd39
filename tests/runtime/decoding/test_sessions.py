"""Sessions: calls that keep the KV cache of those before give what single calls give, and read only what is new."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_reference import PagedReference, hashed, model_of

import runtime


def turns(count: int, length: int = 7) -> list[list[int]]:
    """Prompts of which each begins with the one before, but for its last two tokens."""
    prompts = [list(range(20, 20 + length))]
    for number in range(count - 1):
        prompts.append([*prompts[-1][:-2], *range(40 + number, 40 + number + length)])
    return prompts


def test_prompts_are_read_from_where_they_differ() -> None:
    engine = PagedReference(hashed(), page_size=2)
    model, session = model_of(engine), model_of(engine).session()
    for number, prompt in enumerate(turns(6)):
        expected = model.generate(prompt, max_new_tokens=4)
        assert session.generate(prompt, max_new_tokens=4) == expected
        shared = session.stats["shared_prompt_tokens"]
        assert shared == (0 if number == 0 else shared)
        assert session.stats["prompt_tokens"] == len(prompt)
    assert shared > 0
    assert session.generate(prompt, max_new_tokens=4) == expected
    assert session.stats["shared_prompt_tokens"] == (len(prompt) - 1) // 2 * 2
    assert model.stats["shared_prompt_tokens"] == 0, "the model itself keeps nothing"


def test_a_batch_and_two_calls_at_once() -> None:
    engine = PagedReference(hashed(), page_size=2)
    model, session = model_of(engine), model_of(engine).session()
    prompts = turns(4)
    assert session.generate(prompts, max_new_tokens=3) == model.generate(prompts, max_new_tokens=3)
    first = session.stream(prompts[0], max_new_tokens=5)
    begun = [next(first)]
    second = session.generate(prompts[1], max_new_tokens=5)  # has a pool of its own: the first is not done
    assert second == model.generate(prompts[1], max_new_tokens=5)
    assert [*begun, *first] == model.generate(prompts[0], max_new_tokens=5)


def test_an_interrupted_call_spoils_nothing() -> None:
    engine = PagedReference(hashed(), page_size=2)
    model, session = model_of(engine), model_of(engine).session()
    prompts = turns(3)
    session.generate(prompts[0], max_new_tokens=9)  # a pool with room for what follows
    stream = session.stream(prompts[1], max_new_tokens=6)
    next(stream)
    stream.close()
    assert session.generate(prompts[2], max_new_tokens=3) == model.generate(prompts[2], max_new_tokens=3)
    assert session.stats["shared_prompt_tokens"] > 0


@pytest.mark.parametrize("options", [{}, {"drafter": "lookup"}, {"kv_cache": "int8"}], ids=str)
@pytest.mark.parametrize("kind", ["modules", "native"])
def test_real_engines(bundled: Any, tiny_artifact: Any, kind: str, options: dict[str, Any]) -> None:
    options = {"kv_cache": {"keys": "int8", "values": "int8"}} if "kv_cache" in options else options
    path = bundled if kind == "modules" else tiny_artifact
    model = runtime.load(path, dtype="float32", **options)
    session = model.session()
    limit = model.engine.vocab_size
    prompts = [[token * 7 % limit for token in prompt] for prompt in turns(3, 35)]
    for prompt in prompts:
        assert session.generate(prompt, max_new_tokens=8) == model.generate(prompt, max_new_tokens=8)
    shared = session.stats["shared_prompt_tokens"]
    if not model.engine.lockstep:
        assert shared == 64
    elif options:
        assert shared == 0
    else:
        assert shared == len(prompts[1]) - 2


def test_a_full_sliding_window_is_read_again(tiny_mistral: Any) -> None:
    model = runtime.load(tiny_mistral, dtype="float32")
    session = model.session()
    for prompt in turns(3, 20):
        assert session.generate(prompt, max_new_tokens=4) == model.generate(prompt, max_new_tokens=4)
    assert session.stats["shared_prompt_tokens"] == 0
    grown = [*prompt, *session.generate(prompt, max_new_tokens=4), 5, 6]
    assert session.generate(grown, max_new_tokens=4) == model.generate(grown, max_new_tokens=4)
    if model.engine.lockstep:
        assert session.stats["shared_prompt_tokens"] == len(grown) - 3, "nothing has to be taken back"


@pytest.fixture(scope="module")
def tiny_mistral(tmp_path_factory: Any) -> Any:
    from family_models import FAMILIES

    torch.manual_seed(0)
    family = next(family for family in FAMILIES if family.name == "mistral")
    return family.write(tmp_path_factory.mktemp("mistral"))
