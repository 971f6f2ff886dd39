"""Model: against transformers' own forward pass and generate, alone and in batches, as text and as ids."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import gpt2, llama, save, tokenizer

import runtime
from runtime.api.model import Model
from runtime.errors import CompressError, RequestError

PROMPTS = ["Once upon a time", "cat", "def add(a, b):\n    return", "Grüße aus 東京 🙂 and the cat sat on the mat"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """On transformers' modules."""
    return runtime.load(save(llama(), tmp_path_factory.mktemp("llama")), kernels="reference")


@pytest.fixture(scope="module", params=["llama", "gpt2", "llama sliding window", "llama bfloat16"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    """(ours, transformers') of the same checkpoint."""
    from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

    path = tmp_path_factory.mktemp("pair")
    if request.param == "gpt2":
        save(gpt2(), path)
    elif request.param == "llama sliding window":
        torch.manual_seed(0)
        config = MistralConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=400, max_position_embeddings=128, initializer_range=0.5, sliding_window=8, eos_token_id=1,
        )  # fmt: skip
        save(MistralForCausalLM(config).eval(), path)
    elif request.param == "llama bfloat16":
        save(llama().bfloat16(), path)
    else:
        save(llama(tie_word_embeddings=False), path)
    # In 8 bits of mantissa the modules round where the decoder in C does not.
    kernels = "reference" if request.param == "llama bfloat16" else "auto"
    return runtime.load(path, kernels=kernels), AutoModelForCausalLM.from_pretrained(path).eval()


def ids(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


def test_what_a_tokenizer_gives_is_no_set_of_options(model: Model) -> None:
    for call in (model.generate, model.stream):
        with pytest.raises(RequestError, match="no option 'input_ids': give texts or token ids as the first argument"):
            call(**tokenizer()("a"))  # type: ignore[call-overload]


# -------------------------------------------------------------------- against transformers
@torch.inference_mode()
def test_logits_are_those_of_transformers(pair: tuple[Model, Any]) -> None:
    ours, theirs = pair
    batch = torch.randint(2, 400, (3, 17), generator=torch.Generator().manual_seed(0))
    logits = ours.logits(batch)
    assert (logits.shape, logits.dtype) == ((3, 17, 400), torch.float32)
    wanted = theirs(batch).logits
    assert float((logits - wanted).norm() / wanted.norm()) < 1e-5
    assert torch.equal(ours.logits(batch.tolist()), logits)


@torch.inference_mode()
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_those_of_transformers(pair: tuple[Model, Any], prompt: str) -> None:
    ours, theirs = pair
    tokens = torch.tensor([ids(prompt)])
    expected = theirs.generate(tokens, max_new_tokens=30, do_sample=False, pad_token_id=0)[
        0, tokens.shape[1] :
    ].tolist()
    assert ours.generate(ids(prompt), max_new_tokens=30) == expected
    assert len(set(expected)) > 3  # a model that repeats itself would show little
    assert ours.generate(prompt, max_new_tokens=30) == tokenizer().decode(expected, skip_special_tokens=True)


@torch.inference_mode()
def test_repetition_penalty_is_that_of_transformers(pair: tuple[Model, Any]) -> None:
    ours, theirs = pair
    tokens = torch.tensor([ids(PROMPTS[0])])
    options = {"max_new_tokens": 30, "repetition_penalty": 1.5}
    expected = theirs.generate(tokens, do_sample=False, pad_token_id=0, **options)[0, tokens.shape[1] :].tolist()
    assert ours.generate(tokens[0].tolist(), **options) == expected
    assert expected != ours.generate(tokens[0].tolist(), max_new_tokens=30)


# -------------------------------------------------------------------- batches
def test_a_batch_gives_what_each_prompt_gives_alone(pair: tuple[Model, Any]) -> None:
    ours, _ = pair
    if ours.engine.module.dtype == torch.bfloat16:
        pytest.skip("in 8 bits of mantissa, batched and single matrix products round differently")
    alone = [ours.generate(prompt, max_new_tokens=25) for prompt in PROMPTS]
    assert ours.generate(PROMPTS, max_new_tokens=25) == alone
    as_ids = [ids(prompt) for prompt in PROMPTS]
    assert ours.generate(as_ids, max_new_tokens=25) == [ours.generate(p, max_new_tokens=25) for p in as_ids]


def test_rows_that_end_early_leave_the_others_alone(model: Model) -> None:
    """End-of-sequence is made a token that comes early in one row only."""
    prompts = [ids(p) for p in PROMPTS]
    free = [model.generate(p, max_new_tokens=20) for p in prompts]
    token = next(t for t in free[0][2:12] if t not in free[2])
    stopping = Model(model.engine, model.tokenizer, model.artifact, frozenset([token]))
    result = stopping.generate(prompts, max_new_tokens=20)
    for mine, full in zip(result, free, strict=True):
        assert mine == (full[: full.index(token) + 1] if token in full else full)
    assert stopping.stats["finish_reasons"][0] == "eos"
    assert stopping.stats["finish_reasons"][2] == "length"
    assert stopping.stats["new_tokens"] == sum(len(r) for r in result)
    assert stopping.generate(prompts, max_new_tokens=20, ignore_eos=True) == free


def test_engines_that_cannot_hide_padding_get_equal_lengths(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model.generate(PROMPTS, max_new_tokens=8)
    batches: list[tuple[int, ...]] = []
    forward = model.engine.forward

    def watched(input_ids: torch.Tensor, cache: Any, mask: Any, *rest: Any, **options: Any) -> torch.Tensor:
        assert mask is None
        batches.append(tuple(input_ids.shape))
        return forward(input_ids, cache, mask, *rest, **options)

    monkeypatch.setattr(model.engine, "padding_is_exact", False)
    monkeypatch.setattr(model.engine, "forward", watched)
    assert model.generate(PROMPTS, max_new_tokens=8) == expected
    assert model.stats["sequences"] == len(PROMPTS)
    assert {shape for shape in batches if shape[1] > 1} == {(1, len(ids(p))) for p in PROMPTS if len(ids(p)) > 1}


def test_many_prompts_are_decoded_in_groups(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded in rows and padding, results in the order asked, progress told."""
    prompts = [ids(PROMPTS[i % 4])[: 1 + i] for i in range(24)]
    alone = [model.generate(prompt, max_new_tokens=6) for prompt in prompts]
    shapes: list[tuple[int, ...]] = []
    forward = model.engine.forward

    def watched(input_ids: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids, *rest, **options)

    monkeypatch.setattr(model.engine, "forward", watched)
    monkeypatch.setattr("runtime.decoding.request.GROUP_ROWS", 7)
    monkeypatch.setattr("runtime.decoding.request.FREE_PADDING", 10)
    seen: list[tuple[int, int]] = []
    together = model.generate(prompts, max_new_tokens=6, progress=lambda done, total: seen.append((done, total)))
    assert together == alone
    assert max(rows for rows, _ in shapes) <= 7
    assert (seen[0], seen[-1]) == ((0, 24), (24, 24))
    assert model.stats["prompt_tokens"] == sum(len(prompt) for prompt in prompts)
    with pytest.raises(RequestError, match="cache_memory"):
        model.generate("cat", cache_memory="1GB")


# -------------------------------------------------------------------- sampling
def test_seeds_reproduce_in_any_batch(model: Model) -> None:
    options = {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.95}
    alone = [model.generate(p, seed=7, **options) for p in PROMPTS]
    assert model.generate(PROMPTS, seed=7, **options) == alone
    assert model.generate(PROMPTS, seed=[7, 8, 7, 9], **options)[2] == alone[2]
    assert model.generate(PROMPTS[0], seed=8, **options) != alone[0]
    assert len({model.generate(PROMPTS[0], **options) for _ in range(4)}) > 1
    with pytest.raises(RequestError, match="seed"):
        model.generate(PROMPTS, seed=[1, 2])


def test_sampling_leaves_the_global_random_state_alone(model: Model) -> None:
    before = torch.random.get_rng_state()
    model.generate("cat", temperature=1.0, max_new_tokens=4)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_top_k_of_one_is_greedy(model: Model) -> None:
    greedy = model.generate(PROMPTS[0], max_new_tokens=20)
    assert model.generate(PROMPTS[0], max_new_tokens=20, temperature=1.5, top_k=1) == greedy
    assert model.generate(PROMPTS[0], max_new_tokens=20, temperature=1.5, top_p=1e-9) == greedy
    assert model.generate(PROMPTS[0], max_new_tokens=20, temperature=1.5, min_p=1.0) == greedy


# -------------------------------------------------------------------- stop strings and streams
def test_text_ends_before_the_stop_string(model: Model) -> None:
    full = model.generate(PROMPTS[0], max_new_tokens=40)
    assert len(full) > 30
    for begin, end in ((10, 12), (7, 13), (0, 1), (20, 29)):
        stop = full[begin:end]
        assert model.generate(PROMPTS[0], max_new_tokens=40, stop=stop) == full[: full.index(stop)]
        assert model.stats["finish_reasons"] == ["stop"]
    assert (
        model.generate(PROMPTS[0], max_new_tokens=40, stop=["never this", full[10:12]])
        == full[: full.index(full[10:12])]
    )


def test_ids_end_before_the_stop_string(model: Model) -> None:
    prompt = ids(PROMPTS[0])
    full = model.generate(prompt, max_new_tokens=40)
    text = tokenizer().decode(full)
    stop = text[12:15]
    result = model.generate(prompt, max_new_tokens=40, stop=stop)
    assert full[: len(result)] == result
    assert text[: text.index(stop)].startswith(tokenizer().decode(result))
    assert list(model.stream(prompt, max_new_tokens=40, stop=stop)) == result


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.2, "seed": 3}, {"stop": ["e", "zz"]}, {"temperature": 2.0, "seed": 1, "stop": "a "}],
)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_streamed_pieces_are_the_generated_text(model: Model, prompt: str, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 40, **options}
    pieces = list(model.stream(prompt, **options))
    assert "".join(pieces) == model.generate(prompt, **options)
    assert all(pieces)
    assert list(model.stream(ids(prompt), **options)) == model.generate(ids(prompt), **options)


def test_a_stream_checks_its_request_at_once_and_may_be_left(model: Model) -> None:
    with pytest.raises(RequestError, match="max_new_tokens"):
        model.stream("cat", max_new_tokens=0)
    with pytest.raises(RequestError, match="one prompt"):
        model.stream(["cat", "dog"])
    stream = model.stream(ids("cat"), max_new_tokens=100, ignore_eos=True)
    assert not torch.is_inference_mode_enabled()
    assert [next(stream) for _ in range(3)] == model.generate(ids("cat"), max_new_tokens=3, ignore_eos=True)
    assert not torch.is_inference_mode_enabled()
    stream.close()
    assert model.stats["new_tokens"] == 3
    assert model.stats["finish_reasons"] == ["stopped by the caller"]


# -------------------------------------------------------------------- scores
@torch.inference_mode()
def test_score_is_the_cross_entropy(pair: tuple[Model, Any]) -> None:
    ours, theirs = pair
    tokens = torch.tensor([ids(PROMPTS[3])])
    loss = float(torch.nn.functional.cross_entropy(theirs(tokens).logits[0, :-1].float(), tokens[0, 1:]))
    score = ours.score(PROMPTS[3])
    assert score.tokens == tokens.shape[1] - 1
    assert math.isclose(score.log_likelihood, -loss * score.tokens, rel_tol=1e-5)
    assert math.isclose(score.perplexity, math.exp(loss), rel_tol=1e-5)
    assert ours.score(tokens[0].tolist()) == score
    assert ours.score([PROMPTS[0], PROMPTS[3]])[1] == score


def test_long_texts_are_scored_in_chunks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(2, 400, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = model.score(tokens)
    monkeypatch.setattr("runtime.api.model.SCORE_CHUNK", 7)
    assert math.isclose(model.score(tokens).log_likelihood, whole.log_likelihood, rel_tol=1e-5)


# -------------------------------------------------------------------- memory and numbers
def test_stats(model: Model) -> None:
    prompts = [ids(p) for p in PROMPTS]
    model.generate(prompts, max_new_tokens=5, ignore_eos=True)
    stats = model.stats
    assert stats["prompt_tokens"] == sum(len(p) for p in prompts)
    assert (stats["sequences"], stats["new_tokens"]) == (4, 20)
    assert stats["prefill_seconds"] > 0
    assert stats["decode_seconds"] > 0
    assert math.isclose(stats["tokens_per_second"], 16 / stats["decode_seconds"])
    positions = max(len(p) for p in prompts) + 4  # the last new token never enters the cache
    assert stats["cache_bytes"] == 2 * 2 * 4 * 2 * 16 * positions * 4  # layers, K and V, batch, heads, width, bytes
    assert stats["weight_bytes"] == sum(p.nbytes for p in llama().parameters()) + 2 * 8 * 4  # tied once; rotary


def test_the_cache_is_freed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[Any] = []
    new_cache = model.engine.new_cache

    def watched() -> Any:
        cache = new_cache()
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(model.engine, "new_cache", watched)
    model.generate(PROMPTS, max_new_tokens=3)
    list(model.stream("cat", max_new_tokens=3))
    gc.collect()
    assert len(caches) == 2
    assert all(cache() is None for cache in caches)


def test_explain_names_what_computes(model: Model) -> None:
    explained = model.explain()
    assert explained["model.layers.0.self_attn.q_proj"] == "torch float32"
    assert len(explained) == 2 * 7 + 1


# -------------------------------------------------------------------- wrong requests
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([[]], "prompt 0 is empty"),
        (["cat", ""], "prompt 1 is empty"),
        (["cat", "cat" * 200], "prompt 1 has .* tokens, the model's context holds 128"),
        ([[5], [5] * 128], "prompt 1 has 128 tokens .* no room"),
        (3, "not a int"),
        (None, "not a NoneType"),
        (["cat", 3], "not a mixture"),
        ([1.5], "not a mixture"),
        ([True], "not a mixture"),
        ([3, 400], "token id 400 is outside the vocabulary: ids are 0 to 399"),
        ([-1], "token id -1"),
        ("\ud800", "not valid Unicode"),
        ([5] * 129, "has 129 tokens, the model's context holds 128"),
        ([5] * 128, "no room"),
    ],
    ids=lambda value: str(value)[:20].encode("ascii", "replace").decode(),
)
def test_bad_prompts(model: Model, prompt: Any, message: str) -> None:
    for call in (model.generate, model.stream):
        if call == model.stream and isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            continue
        with pytest.raises(RequestError, match=message):
            call(prompt)


def test_new_tokens_must_fit_the_context(model: Model) -> None:
    assert len(model.generate([5] * 120, max_new_tokens=8, ignore_eos=True)) == 8
    assert len(model.generate([5] * 120, ignore_eos=True)) == 8
    with pytest.raises(RequestError, match="8"):
        model.generate([5] * 120, max_new_tokens=9)


@pytest.mark.parametrize("bad", [[1, 2], [[1], [2, 3]], [[1.5]], [[]], "text", [[400]], [[True]]])
def test_bad_ids_for_logits(model: Model, bad: Any) -> None:
    with pytest.raises(RequestError):
        model.logits(bad)


def test_bad_scores(model: Model) -> None:
    with pytest.raises(RequestError, match="two tokens"):
        model.score([5])
    with pytest.raises(RequestError, match="empty"):
        model.score("")


def test_unknown_options_name_the_nearest(model: Model) -> None:
    with pytest.raises(RequestError, match="top_p"):
        model.stream("cat", **{"top-p": 0.5})


def test_broken_weights_are_noticed(model: Model) -> None:
    weight = model.engine.module.model.norm.weight
    before = weight.clone()
    weight.fill_(float("nan"))
    try:
        with pytest.raises(CompressError, match="NaN"):
            model.generate("cat")
    finally:
        weight.copy_(before)


def test_without_a_tokenizer_ids_still_work(tmp_path: Path) -> None:
    bare = runtime.load(save(llama(), tmp_path, with_tokenizer=False))
    assert len(bare.generate([5, 6], max_new_tokens=3, ignore_eos=True)) == 3
    assert bare.tokenizer is None
    for call in (lambda: bare.generate("cat"), lambda: bare.score("cat"), lambda: bare.stream("cat")):
        with pytest.raises(RequestError, match="no tokenizer"):
            call()
    with pytest.raises(RequestError, match="stop"):
        bare.generate([5], stop="x")


# -------------------------------------------------------------------- the bundled checkpoint
@torch.inference_mode()
def test_the_bundled_checkpoint_is_read_as_transformers_reads_it() -> None:
    from transformers import AutoModelForCausalLM

    path = Path(__file__).parents[3] / "recipes" / "checkpoints" / "stdlib-4m"
    ours, theirs = runtime.load(path), AutoModelForCausalLM.from_pretrained(path).eval()
    prompt = "def main():\n    parser = argparse."
    tokens = torch.tensor([ours.tokenizer(prompt)["input_ids"]])
    found, wanted = ours.logits(tokens), theirs(tokens).logits.float()
    assert float((found - wanted).norm() / wanted.norm()) < 0.02  # it is stored in bfloat16
    expected = theirs.generate(tokens, max_new_tokens=24, do_sample=False, pad_token_id=0)[
        0, tokens.shape[1] :
    ].tolist()
    assert ours.generate(tokens[0].tolist(), max_new_tokens=24) == expected
    assert "".join(ours.stream(prompt, max_new_tokens=24)) == ours.generate(prompt, max_new_tokens=24)
