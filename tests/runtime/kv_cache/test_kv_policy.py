"""Policies: what may be written, what is refused and why, and that what is written is what runs."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import random_config, random_llama

import runtime
from runtime.config.settings import ConfigError
from runtime.errors import CompressError, RequestError
from runtime.kv_cache.estimate import full_bytes, held_bytes, needed_bytes
from runtime.kv_cache.policy.calibrated import Calibrated, fingerprint
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.policy.presets import PRESETS
from runtime.kv_cache.policy.registries import AXES, CODECS, SCORES, SELECTIONS
from runtime.kv_cache.shape import Shape
from runtime.system.self_hash import sealed_json

KEPT = {"keys": "int4", "values": "int4"}


# ---------------------------------------------------------------- the grammar
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_published_name_is_a_policy_that_can_be_written_and_read(name: str) -> None:
    policy = Policy.parse(name)
    assert policy.method == name
    assert Policy.parse(name.replace("-", "_").upper()) == policy
    again = Policy.parse(json.loads(json.dumps(policy.resolved())))
    assert again == policy
    assert again.describe() == policy.describe() != "everything as it comes"
    if not policy.needs:
        policy.plan()


@pytest.mark.parametrize("axis", sorted(AXES))
def test_every_method_of_every_table_is_there_under_its_name(axis: str) -> None:
    for method in AXES[axis]:
        cls = method.load()
        assert dataclasses.is_dataclass(cls)
        assert method.fixed or cls.name == method.name
        assert cls.__doc__


def test_keys_beside_a_published_name_override_it() -> None:
    policy = Policy.parse({"method": "pyramidkv", "evict": {"tokens": 64, "observe": 8}, "keys": "int4", "recent": 32})
    assert policy.evict is not None
    assert (policy.evict.tokens, policy.evict.ratio, policy.evict.layers.name) == (64, None, "pyramid")
    assert policy.evict.score.observe == 8  # type: ignore[attr-defined]
    assert [(tier.keys.name, tier.values.name) for tier in policy.tiers] == [("int4", "plain")]
    assert Policy.parse({"method": "snapkv", "evict": None}).evict is None
    assert Policy.parse({"method": "mikv", "keys": "int8"}).saliency is None
    switched = Policy.parse({"method": "snapkv", "evict": {"score": "tova", "tokens": 9}})
    assert switched.evict is not None
    assert switched.evict.score.name == "tova"


def test_integers_have_grids_a_channel_for_keys_and_a_token_for_values() -> None:
    storage = Policy.parse({**KEPT, "recent": 64, "prefix": 4}).plan().storage
    (tier,) = storage.tiers
    assert (tier.keys.bits, tier.keys.axis) == (4, "channel")  # type: ignore[attr-defined]
    assert (tier.values.bits, tier.values.axis, tier.values.group) == (4, "token", 32)  # type: ignore[attr-defined]
    assert (storage.recent, storage.prefix) == (64, 4)
    other = Policy.parse({"keys": {"codec": "int2", "axis": "token", "group": 16}}).plan().storage.tiers[0].keys
    assert (other.axis, other.group) == ("token", 16)  # type: ignore[attr-defined]


def test_policies_come_from_json_texts_and_files(tmp_path: Path) -> None:
    written = {"method": "snapkv", "keys": "int4", "values": "int4"}
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(written), encoding="utf-8")
    assert Policy.parse(str(file)) == Policy.parse(json.dumps(written)) == Policy.parse(written)
    file.write_text('{"recent": -1}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"policy\.json: kv_cache\.recent"):
        Policy.parse(str(file))


_codecs = st.one_of(
    st.sampled_from(CODECS.names),
    st.builds(lambda s: {"codec": "bitmap", "sparsity": s}, st.floats(0.1, 0.9)),
    st.builds(lambda g: {"codec": "int4", "axis": "token", "group": g}, st.sampled_from([0, 16, 64])),
)
_scores = st.one_of(
    st.sampled_from([name for name in SCORES.names if name != "duo"]),
    st.builds(
        lambda w, k: {"score": "snapkv", "observe": w, "kernel": 2 * k + 1}, st.integers(1, 64), st.integers(0, 4)
    ),
    st.builds(lambda g: {"score": "cake", "observe": 16, "gamma": g}, st.floats(0, 1e4)),
    st.builds(lambda n: {"score": "keyformer", "generation_length": n, "seed": n}, st.integers(1, 9999)),
    st.just({"score": "duo", "streaming": 0.25, "inner": {"score": "tova"}}),
)
_budgets = st.one_of(
    st.builds(lambda r: {"ratio": r}, st.floats(0.01, 1)), st.builds(lambda t: {"tokens": t}, st.integers(200, 9999))
)


@st.composite
def policies(draw: Any) -> dict[str, Any]:
    """Anything that may be written, a preset or not."""
    policy: dict[str, Any] = {}
    if draw(st.booleans()):
        policy["method"] = draw(st.sampled_from(sorted(PRESETS)))
    if draw(st.booleans()):
        score = draw(_scores)
        policy["evict"] = {
            **({"score": score} if isinstance(score, str) else score), **draw(_budgets),
            "layers": draw(st.sampled_from(["uniform", {"share": "pyramid", "beta": 3}, "cake"])),
            "heads": draw(st.sampled_from(["equal", "adaptive"])),
        }  # fmt: skip
        if draw(st.booleans()):
            policy["evict"]["interval"] = draw(st.one_of(st.none(), st.integers(1, 500)))
    storage = draw(st.sampled_from(["none", "one", "tiers", "clusters"]))
    if storage == "one":
        policy |= {"keys": draw(_codecs), "values": draw(_codecs)}
    elif storage == "tiers":
        share = draw(st.sampled_from([0.25, 0.4, 0.5]))
        policy["tiers"] = [{"keys": draw(_codecs), "values": draw(_codecs), "share": s} for s in (share, 1 - share)]
        policy["saliency"] = draw(st.sampled_from(["normalized", "snapkv", "tova"]))
    elif storage == "clusters":
        policy["clusters"] = draw(st.sampled_from([{}, {"ratio": 0.25}, {"chunk": 64}]))
    for key, values in {
        "recent": st.integers(0, 512), "prefix": st.one_of(st.integers(0, 9), st.just("calibrated")),
        "select": st.sampled_from(
            ["quest", {"method": "double-sparsity", "tokens": 64}, {"method": "tidal", "ratio": 0.5, "select_layers": [3, 5]}]
        ),
        "offload": st.sampled_from(["host", "disk", {"to": "disk", "directory": "/tmp"}]),
        "floats": st.sampled_from(["bfloat16", "float32"]),
        "calibrated": st.just(
            {"fingerprint": "f", "gates": [[0.5, 1]], "prefix_tokens": [3, 4], "seconds": {"gates": 1.5}}
        ),
    }.items():  # fmt: skip
        if draw(st.booleans()):
            policy[key] = draw(values)
    return policy


@settings(max_examples=200, deadline=None)
@given(policies())
def test_what_is_resolved_is_read_as_the_same_policy(written: dict[str, Any]) -> None:
    try:
        policy = Policy.parse(written)
    except ConfigError:  # an impossible combination; those have tests of their own
        return
    resolved = json.loads(json.dumps(policy.resolved(), allow_nan=False))
    again = Policy.parse(resolved)
    assert again == policy
    assert again.resolved() == policy.resolved()
    assert again.draft() == policy.draft()


# ---------------------------------------------------------------- what is refused
WRONG: list[tuple[Any, str, str]] = [
    (True, "", "true"),
    (["int4"], "", "list"),
    ("snapvk", "", "'snapkv'"),
    ("missing.json", "", "missing.json"),
    ("{", "", "JSON"),
    ({"evikt": "snapkv"}, "evikt", "'evict'"),
    ({"floats": "bfloat"}, "floats", "'bfloat16'"),
    ({"method": "snapvk"}, "method", "'snapkv'"),
    ({"method": 3}, "method", "3"),
    ({"evict": "snapvk"}, "evict.score", "'snapkv'"),
    ({"evict": "pyramidkv"}, "evict.score", "`method: pyramidkv`"),
    ({"evict": {"ratio": 0.5}}, "evict", "'score'"),
    ({"evict": 0.5}, "evict.score", "0.5"),
    ({"evict": {"score": "snapkv", "rato": 0.5}}, "evict.rato", "'ratio'"),
    ({"evict": {"score": "snapkv", "sinks": 4}}, "evict.sinks", "score, layers, heads, ratio, tokens, interval, prompt, observe"),
    ({"evict": {"score": "snapkv", "ratio": 0}}, "evict.ratio", "got 0"),
    ({"evict": {"score": "snapkv", "ratio": 1.01}}, "evict.ratio", "1"),
    ({"evict": {"score": "snapkv", "ratio": math.nan}}, "evict.ratio", "got nan"),
    ({"evict": {"score": "snapkv", "ratio": "25%"}}, "evict.ratio", "number"),
    ({"evict": {"score": "snapkv", "ratio": True}}, "evict.ratio", "got true"),
    ({"evict": {"score": "snapkv", "ratio": 10**400}}, "evict.ratio", "number"),
    ({"evict": {"score": "snapkv", "tokens": 10**400}}, "evict.tokens", "integer"),
    ({"evict": {"score": "snapkv", "tokens": True}}, "evict.tokens", "got true"),
    ({"evict": {"score": "snapkv", "tokens": 512, "ratio": 0.5}}, "evict.tokens", "one"),
    ({"evict": {"score": "snapkv", "tokens": 32}}, "evict.tokens", "32"),
    ({"evict": {"score": "snapkv", "tokens": 36}, "prefix": 4}, "evict.tokens", "36"),
    ({"evict": {"score": "snapkv", "kernel": 4}}, "evict.kernel", "odd"),
    ({"evict": {"score": "snapkv", "observe": -3}}, "evict.observe", "1"),
    ({"evict": {"score": "snapkv", "interval": 0}}, "evict.interval", "1"),
    ({"evict": {"score": "snapkv", "layers": "pyramit"}}, "evict.layers", "'pyramid'"),
    ({"evict": {"score": "snapkv", "heads": {"safeguard": 0.1}}}, "evict.heads", "'share'"),
    ({"evict": {"score": "snapkv", "heads": {"share": "adaptive", "safeguard": 1}}}, "evict.heads.safeguard", "1"),
    ({"evict": {"score": "duo", "gates": [[1]]}}, "evict.gates", "calibration"),
    ({"evict": {"score": "duo", "inner": "duo"}}, "evict.inner", "duo"),
    ({"keys": "int3"}, "keys", "'int3'"),
    ({"keys": {"codec": "int4", "bits": 3}}, "keys.bits", "unknown"),
    ({"keys": {"codec": "int4", "axis": "row"}}, "keys.axis", "token, channel"),
    ({"keys": {"codec": "int4", "group": 32}}, "keys.group", "token"),
    ({"values": {"codec": "bitmap", "sparsity": 1}}, "values.sparsity", "1"),
    ({"values": {"codec": "plain", "group": 3}}, "values.group", "none"),
    ({"keys": "int4", "tiers": [KEPT]}, "keys", "one"),
    ({"recent": -1}, "recent", "0"),
    ({"recent": 1e20}, "recent", "integer"),
    ({"prefix": "outliers"}, "prefix", "calibrated"),
    ({"tiers": []}, "tiers", "list"),
    ({"tiers": [{**KEPT, "share": 0.5}, {**KEPT, "share": 0.4}]}, "tiers", "0.9"),
    ({"tiers": [KEPT, KEPT]}, "tiers[0]", "'share'"),
    ({"tiers": [{**KEPT, "share": 2}]}, "tiers[0].share", "1"),
    ({"saliency": "snapkv", **KEPT}, "saliency", ""),
    ({"method": "zipcache", "saliency": "h2o"}, "saliency", "h2o"),
    ({"method": "zipcache", "saliency": "duo"}, "saliency", "duo"),
    ({"clusters": {"ratio": 0.3}}, "clusters", "0.3"),
    ({"clusters": {"chunk": 100}}, "clusters", "32"),
    ({"clusters": {"ratio": 0.5, "pages": 3}}, "clusters.pages", "unknown"),
    ({"select": "quets"}, "select.method", "'quest'"),
    ({"select": {"method": "quest", "tokens": 0}}, "select.tokens", "1"),
    ({"select": {"method": "tidal", "select_layers": 3}}, "select.select_layers", "integers"),
    ({"select": {"method": "quest", "tokens": 10, "ratio": 0.5}}, "select.tokens", "one"),
    ({"offload": "gpu"}, "offload.to", "host, disk"),
    ({"offload": {"to": "host", "directory": "/tmp"}}, "offload.directory", "disk"),
    ({"calibrated": {"gates": [[1]]}}, "calibrated", "'fingerprint'"),
    ({"calibrated": {"fingerprint": "f", "gates": [[2]]}}, "calibrated.gates[0][0]", "number"),
    ({"calibrated": {"fingerprint": "f", "gates": [[1], [1, 1]]}}, "calibrated.gates", ""),
    ({"calibrated": {"fingerprint": "f", "prefix_tokens": [-1]}}, "calibrated.prefix_tokens[0]", "integer"),
    # Windows that are not shorter than the budget.
    ({"evict": {"score": "tova", "tokens": 100}, **KEPT}, "evict.tokens", "128"),
    ({"evict": {"score": "tova", "tokens": 36}, **KEPT, "recent": 32, "prefix": 4}, "evict.tokens", "36"),
    ({"evict": {"score": "tova", "tokens": 100}, "clusters": {}}, "evict.tokens", "128"),
    ({"evict": {"score": "tova", "tokens": 100}, "offload": "disk"}, "evict.tokens", "128"),
    ({"method": "streamingllm", "evict": {"sinks": 1024}}, "evict.tokens", "1024"),
    ({"evict": {"score": "duo", "tokens": 80}}, "evict.tokens", "80"),
    ({"evict": {"score": "duo", "tokens": 90, "inner": {"score": "snapkv", "observe": 99}}}, "evict.tokens", "99"),
    ({"select": {"method": "quest", "tokens": 16}}, "select.tokens", "64"),
    ({"select": {"method": "quest", "tokens": 64}}, "select.tokens", "recent"),
    ({"select": {"method": "double-sparsity", "tokens": 32}}, "select.tokens", "32"),
    ({"select": {"method": "token-select", "tokens": 36}}, "select.tokens", "36"),
    ({"select": {"method": "tidal", "tokens": 8}}, "select.tokens", "32"),
    ({"select": {"method": "recycled", "tokens": 8}}, "select.tokens", "64"),
    ({"calibrated": {"fingerprint": "f", "channels": [[[1], [1, 2]]]}}, "calibrated.channels", ""),
    # Combinations.
    ({"clusters": {}, "evict": {"score": "tova", "interval": 9}}, "evict.interval", "centroids"),
    ({"method": "zipcache", "evict": {"score": "tova", "interval": 9}}, "evict.interval", "tiers"),
    ({"method": "zipcache", "clusters": {}}, "clusters", ""),
    ({"select": "tidal", "evict": "snapkv"}, "select", "snapkv"),
    ({"select": "token-select", "method": "zipcache"}, "select", "tiers"),
    ({"select": "tidal", "clusters": {}}, "select", "clusters"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "key", "reason"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_what_cannot_be_is_refused_with_its_key_and_the_reason(written: Any, key: str, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        Policy.parse(written)
    sentence = str(caught.value)
    assert sentence.startswith(f"kv_cache.{key}: " if key else "kv_cache: ")
    assert reason in sentence
    assert "\n" not in sentence


def test_selections_that_share_places_go_with_eviction_that_leaves_the_same_tokens_everywhere() -> None:
    aligned = [m.name for m in SELECTIONS if getattr(m.load(), "needs_aligned", False)]
    assert aligned
    for name in aligned:
        Policy.parse({"select": name, "evict": "streaming"})


# ---------------------------------------------------------------- models
def config(**changes: Any) -> Any:
    return random_config(**{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, **changes})


def test_the_fingerprint_is_of_what_calibration_depends_on() -> None:
    own = fingerprint(config())
    assert own == fingerprint(config(max_position_embeddings=9, torch_dtype="float16", tie_word_embeddings=True))
    others: list[dict[str, Any]] = [
        {"intermediate_size": 96},
        {"hidden_act": "gelu"},
        {"bos_token_id": 7},
        {"attention_bias": True},
        {"num_key_value_heads": 4},
        {"vocab_size": 300},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
    ]
    assert len({own, *(fingerprint(config(**change)) for change in others)}) == len(others) + 1
    assert len(own) == 16


def duo(gates: Any, model: Any = None) -> Policy:
    found = {"fingerprint": fingerprint(model or config()), "gates": gates}
    return Policy.parse({"method": "duoattention", "calibrated": found})


def test_a_policy_of_another_model_names_both_fingerprints() -> None:
    gates = [[0.1, 0.9], [0.2, 0.8]]
    duo(gates).check_model(config())
    with pytest.raises(ConfigError) as caught:
        duo(gates).check_model(config(vocab_size=300))
    assert fingerprint(config()) in str(caught.value)
    assert fingerprint(config(vocab_size=300)) in str(caught.value)


def test_gates_and_prefix_tokens_must_fit_the_model() -> None:
    with pytest.raises(ConfigError, match=r"calibrated\.gates"):
        duo([[0.5, 0.5]]).check_model(config())
    known = Calibrated(fingerprint(config()), {"prefix_tokens": (999,)})
    with pytest.raises(ConfigError, match=r"calibrated\.prefix_tokens: .*999"):
        Policy.parse("prefixquant").with_calibrated(known).check_model(config())


def test_ratios_of_short_contexts_that_leave_only_the_window_are_refused_for_the_model() -> None:
    cases: list[tuple[Any, str]] = [
        ("snapkv", r"evict\.ratio: .*\b32\b"),
        ({"evict": {"score": "tova", "ratio": 0.03}, "prefix": 4}, r"evict\.ratio: .*\b5\b"),
        ({"evict": {"score": "streaming", "sinks": 64, "ratio": 0.5}}, r"evict\.ratio: .*\b64\b"),
        ("quest", r"select\.ratio: .*\b64\b"),
        ({"select": {"method": "token-select", "ratio": 0.25}}, r"select\.ratio: .*\b36\b"),
    ]
    for written, sentence in cases:
        policy = Policy.parse(written)
        policy.check_model(config(max_position_embeddings=2048))
        with pytest.raises(ConfigError, match=sentence):
            policy.check_model(config(max_position_embeddings=128))
    for name in PRESETS:
        Policy.parse(name).check_model(config(max_position_embeddings=1024))


def test_channels_and_layers_that_the_model_does_not_have_are_refused_for_it() -> None:
    def sparse(channel: int) -> Policy:
        found = {"fingerprint": fingerprint(config()), "channels": [[[0], [1]], [[2], [channel]]]}
        return Policy.parse({"method": "doublesparsity", "calibrated": found})

    sparse(15).check_model(config())
    with pytest.raises(ConfigError, match=r"calibrated\.channels: .*16"):
        sparse(16).check_model(config())
    tidal = Policy.parse({"select": {"method": "tidal", "select_layers": [2, 5]}})
    tidal.check_model(config(num_hidden_layers=6))
    with pytest.raises(ConfigError, match=r"select\.select_layers: .*5"):
        tidal.check_model(config(num_hidden_layers=4))


def test_what_needs_calibration_is_refused_without() -> None:
    with pytest.raises(ConfigError, match="gates"):
        Policy.parse("duoattention").plan()
    assert Policy.parse("doublesparsity").needs == {"channels"}
    assert Policy.parse("prefixquant").needs == {"prefix_tokens"}
    plan = duo([[0.1, 0.9], [0.2, 0.8]]).plan()
    assert plan.eviction is not None
    assert plan.eviction.score.streams() == [[True, False], [True, False]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("bert", {}, "is an encoder"),
        ("bart", {}, "is an encoder-decoder"),
        ("mamba", {}, "no layer with full attention"),
        ("rwkv", {}, "no layer with full attention"),
        ("mistral", {"sliding_window": 16}, "no layer with full attention"),
        ("recurrent_gemma", {}, "no layer with full attention"),
        ("deepseek_v3", {}, "multi-latent attention"),
    ],
)
def test_architectures_without_such_a_cache_are_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match=reason):
        Policy.parse("kivi").check_model(AutoConfig.for_model(family, **changes))


# ---------------------------------------------------------------- running
PROMPTS = [
    "def read",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__",
    "x = 1",
    "# " + "a long line of text " * 12,
]


def test_an_empty_policy_and_one_for_longer_texts_write_what_no_policy_writes(bundled: Path) -> None:
    """A batch of ragged prompts, whose rows leave at different times."""
    plain = runtime.load(bundled, device="cpu", dtype="float32", kv_cache=False)
    expected = plain.generate(PROMPTS, max_new_tokens=12)
    for policy in ({}, {**KEPT, "recent": 4096}, {"evict": {"score": "snapkv", "ratio": 1.0, "interval": 4}}):
        model = runtime.load(bundled, device="cpu", dtype="float32", kv_cache=policy)
        assert model.generate(PROMPTS, max_new_tokens=12) == expected
        lengths = [3, 9, 1, 6]  # stops at different places
        ids = model.tokenizer(PROMPTS)["input_ids"]
        cut = [model.generate(row, max_new_tokens=n) for row, n in zip(ids, lengths, strict=True)]
        assert cut == [plain.generate(row, max_new_tokens=n) for row, n in zip(ids, lengths, strict=True)]
    assert plain.stats["kv_cache"] is None


def test_rows_that_end_early_leave_a_compressed_batch(bundled: Path) -> None:
    model = runtime.load(bundled, device="cpu", dtype="float32", kv_cache={**KEPT, "recent": 32})
    long = [line * 20 for line in PROMPTS[:3]]
    alone = [model.generate(prompt, max_new_tokens=12, stop="\n") for prompt in long]
    assert model.generate(long, max_new_tokens=12, stop="\n") == alone
    assert len({len(text) for text in alone}) > 1


def test_four_bits_take_less_than_half_as_allocated(bundled: Path) -> None:
    prompt = torch.randint(0, 4096, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    sizes = {}
    for name, policy in (
        ("plain", {}),
        ("int4", {**KEPT, "recent": 32}),
        ("evicted", {"evict": {"score": "snapkv", "ratio": 0.25}}),
    ):
        model = runtime.load(bundled, device="cpu", kernels="reference", kv_cache=policy)
        model.generate(prompt, max_new_tokens=4, ignore_eos=True)
        sizes[name] = model.stats["cache_bytes"]
        estimated = held_bytes(Shape.of(model.engine.module.config, torch.bfloat16), Policy.parse(policy), 600, 4)
        assert sizes[name] == pytest.approx(estimated, rel=0.15)
    full = full_bytes(Shape.of(model.engine.module.config, torch.bfloat16), 603)
    assert full <= sizes["plain"] < 1.1 * full
    assert sizes["int4"] < 0.45 * sizes["plain"]
    assert sizes["evicted"] < 0.35 * sizes["plain"]


def largest(module: Any, policy: Policy, prompt: int, new: int, dtype: torch.dtype, softcap: float = 0.0) -> int:
    """Bytes that a padded prompt and `new` steps allocate in a cache's layers at the worst of all moments, the prompt's output aside."""
    from torch.profiler import ProfilerActivity, profile

    from runtime.kv_cache.cache import CompressedCache

    cache, config = CompressedCache(module, policy.plan()), module.config
    count, size = prompt + new, config.head_dim
    drawn = torch.Generator().manual_seed(3)
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    states = [torch.randn(1, number, count + 1, size, generator=drawn).to(dtype) for number in heads]
    valid = torch.arange(prompt + 1)[None] > 0
    gc.collect()  # what an earlier case left must not be freed while this one is recorded
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        before = 0
        for after in (prompt + 1, *range(prompt + 2, count + 2)):
            for layer in cache.layers:
                query, key, value = (part[:, :, before:after] for part in states)
                layer.attend(query, *layer.update(key, value), None if before else valid, size**-0.5, softcap)
            before = after
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = list(itertools.accumulate(number for _, number in changes))
    assert held[-1] == pytest.approx(cache.nbytes + cache.offloaded_bytes, rel=0.12)
    # What is offloaded to a disk is mapped, and counted too.
    return max(held) - cache.offloaded_bytes - heads[0] * (prompt + 1) * size * dtype.itemsize


_WINDOW = {"score": "snapkv", "observe": 16}
_NEAR = {**KEPT, "recent": 32}


@pytest.mark.sampled(10, 10)
@pytest.mark.parametrize(
    ("layers", "dtype", "softcap"),
    [(2, torch.float32, 0.0), (6, torch.float32, 0.0), (2, torch.bfloat16, 0.0), (2, torch.bfloat16, 30.0)],
    ids=str,
)
@pytest.mark.parametrize(
    "written",
    [
        {}, _NEAR, "kivi", "zipcache", "kvclustering", {**_NEAR, "prefix": 4}, {"floats": "bfloat16"},
        {"offload": "disk", "recent": 32}, {"offload": "disk", "recent": 32, "evict": {**_WINDOW, "interval": 16}},
        {"evict": _WINDOW}, {"evict": {**_WINDOW, "interval": 16}},
        {"evict": {**_WINDOW, "tokens": 100, "interval": 16}, **_NEAR}, {"method": "zipcache", "evict": _WINDOW}, "h2o", "keyformer",
        {"evict": "h2o"}, {"method": "h2o", "evict": {"recent": 8, "interval": 1}}, {"method": "h2o", **_NEAR}, "tova",
        {"evict": {"score": "streaming", "tokens": 64, "interval": 8}}, "pyramidkv", "cake", {"method": "cake", **_NEAR},
        {"method": "cake", "evict": {"ratio": 0.6}, **_NEAR}, "layer-defensivekv", {"method": "layer-defensivekv", **_NEAR},
        "adakv", {"method": "adakv", **_NEAR}, "duoattention", {"method": "h2o", "floats": "bfloat16"},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_call_will_take_is_never_less_than_it_takes_and_not_much_more(
    written: Any, layers: int, dtype: torch.dtype, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.kv_cache import attend as prompts
    from runtime.kv_cache import observation, prepare, reference

    # What is bounded, however long a prompt is, must not hide what is not.
    for place, name in ((observation, "CHUNK_BYTES"), (prompts, "SLICE_BYTES"), (reference, "BLOCK_BYTES")):
        monkeypatch.setattr(place, name, 32 << 10)
    module = random_llama(
        hidden_size=256, head_dim=64, num_hidden_layers=layers, max_position_embeddings=1024, wide=False
    )
    prepare(module)
    policy = Policy.parse(written)
    if policy.needs:
        policy = policy.with_calibrated(Calibrated(fingerprint(module.config), {"gates": ((0.1, 0.9),) * layers}))
    taken = largest(module, policy, 300, 40, dtype, softcap)
    needed = needed_bytes(Shape.of(module.config, dtype), policy, 300, 40)
    assert taken <= needed <= 1.5 * taken


def test_two_layers_of_what_is_offloaded_to_the_host_are_on_the_gpu() -> None:
    shape = Shape.of(config(num_hidden_layers=8), torch.float32)
    disk, host = (needed_bytes(shape, Policy.parse({"offload": to, "recent": 32}), 1, 9000) for to in ("disk", "host"))
    older = 1 + 9000 - 32 - 32  # of which 32 wait for their page
    assert host - disk == pytest.approx(2 * older * shape.layers[0].token, abs=2)


def test_stats_say_what_holds_the_cache_and_what_computes(bundled: Path) -> None:
    model = runtime.load(bundled, device="cpu", kv_cache="kivi")
    model.generate("import os", max_new_tokens=2)
    assert model.stats["kv_cache"] == "keys int2, values int2"
    assert "compressed cache" in model.stats["engine"]


def test_an_artifact_brings_its_policy_and_can_be_overruled(tiny_artifact: Path, tmp_path: Path) -> None:
    import shutil

    path = shutil.copytree(tiny_artifact, tmp_path / "artifact")
    assert runtime.load(path, device="cpu").stats["kv_cache"] is None
    manifest = json.loads((path / "compress.json").read_text(encoding="utf-8"))
    from transformers import AutoConfig

    own = fingerprint(AutoConfig.from_pretrained(path))
    found = {"fingerprint": own, "gates": [[0.1, 0.9], [0.8, 0.2]]}
    manifest["kv_cache"] = Policy.parse({"method": "duoattention", "calibrated": found}).resolved()
    (path / "compress.json").write_text(sealed_json(manifest), encoding="utf-8")
    assert runtime.load(path, device="cpu").stats["kv_cache"].startswith("duo")
    assert runtime.load(path, device="cpu", kv_cache=False).stats["kv_cache"] is None
    assert runtime.load(path, device="cpu", kv_cache="none").stats["kv_cache"] is None
    assert runtime.load(path, device="cpu", kv_cache="kivi").stats["kv_cache"] == "keys int2, values int2"
    # What was calibrated for the artifact serves another policy that needs it.
    other = runtime.load(path, device="cpu", kv_cache={"method": "duoattention", **KEPT})
    assert other.engine._plan.eviction.score.gates == ((0.1, 0.9), (0.8, 0.2))
    with pytest.raises(RequestError, match="doublesparsity needs channels"):
        runtime.load(path, device="cpu", kv_cache={"method": "doublesparsity", "select": {"ratio": 0.5}})
    manifest["kv_cache"]["calibrated"]["fingerprint"] = "0" * 16
    (path / "compress.json").write_text(sealed_json(manifest), encoding="utf-8")
    with pytest.raises(RequestError, match=rf"compress\.json: kv_cache.*{own}"):
        runtime.load(path, device="cpu")
    manifest["kv_cache"] = {"keys": "int5"}
    (path / "compress.json").write_text(sealed_json(manifest), encoding="utf-8")
    with pytest.raises(RequestError, match=r"compress\.json: kv_cache\.keys: .*'int5'"):
        runtime.load(path, device="cpu")


def test_prefix_tokens_come_before_every_prompt_unseen(tiny_llama: Any) -> None:
    """As if the prompts began with them; padding, positions and later steps included."""
    path = tiny_llama()
    from transformers import AutoConfig

    known = {"fingerprint": fingerprint(AutoConfig.from_pretrained(path)), "prefix_tokens": [7, 8, 9]}
    plain = runtime.load(path, device="cpu", dtype="float32", kv_cache=False)
    policy = {"prefix": "calibrated", "calibrated": known}
    model = runtime.load(path, device="cpu", dtype="float32", kv_cache=policy)
    prompts = [[5, 6, 10, 11, 12], [20], [30, 31, 32]]
    expected = plain.generate([[7, 8, 9, *prompt] for prompt in prompts], max_new_tokens=8, ignore_eos=True)
    assert model.generate(prompts, max_new_tokens=8, ignore_eos=True) == expected
    assert [model.generate(p, max_new_tokens=8, ignore_eos=True) for p in prompts] == expected
    assert model.stats["prompt_tokens"] == 3
    assert model.engine.context_length == plain.engine.context_length - 3
    torch.testing.assert_close(model.logits([prompts[0]]), plain.logits([prompts[0]]), atol=1e-4, rtol=1e-4)
    with pytest.raises(RequestError, match="context"):
        model.generate([1] * 120, max_new_tokens=8)


def test_a_cache_larger_than_memory_is_refused_before_anything_runs(bundled: Path) -> None:
    model = runtime.load(bundled, device="cpu", kernels="reference", kv_cache=KEPT)
    with pytest.raises(RequestError, match="cache_memory"):
        model.generate([1] * 500, max_new_tokens=4, cache_memory="100 KB")
    short = [[1, 2, 3, 4]] * 5
    one = model.engine.cache_factory.need(4, 4)
    assert model.generate(short, max_new_tokens=4, ignore_eos=True, cache_memory=2 * one)
    assert model.stats["steps"] == 3 * 4, "two at a time"


def test_a_bound_on_memory_goes_with_a_policy(tiny_artifact: Path) -> None:
    plain = runtime.load(tiny_artifact, device="cpu", kv_cache={})
    model = runtime.load(tiny_artifact, device="cpu", kv_cache={}, max_memory="2GB")
    prompt = list(range(40))
    assert model.generate(prompt, max_new_tokens=6) == plain.generate(prompt, max_new_tokens=6)
    assert model.stats["kv_cache"] == "everything as it comes"


def test_attention_that_reads_no_compressed_cache_is_refused_when_loading(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="BloomForCausalLM"):
        runtime.load(tmp_path, device="cpu", kv_cache="kivi")


def test_wrong_kinds_of_policies_are_refused_by_load(bundled: Path) -> None:
    for wrong, reason in ((True, "not True"), (3, "expected a mapping"), ({"offload": "host"}, "offload")):
        with pytest.raises(RequestError, match=reason):
            runtime.load(bundled, device="cpu", kv_cache=wrong)


def test_keys_that_integers_cannot_hold_end_a_text_with_the_way_out(tiny_llama: Any, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    path = Path(shutil.copytree(tiny_llama(), tmp_path / "large"))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name] * 1e6}, path / "model.safetensors", metadata={"format": "pt"})
    prompt = list(range(1, 101))
    held = {"device": "cpu", "dtype": "float32"}
    model = runtime.load(path, **held, kv_cache={"keys": "int4", "recent": 32})
    with pytest.raises(RequestError, match=r"int4.*65504"):
        model.generate(prompt, max_new_tokens=2)
    assert runtime.load(path, **held, kv_cache={"keys": "fp8", "recent": 32}).generate(prompt, max_new_tokens=2)
    save_file({**tensors, name: tensors[name] * float("nan")}, path / "model.safetensors", metadata={"format": "pt"})
    model = runtime.load(path, **held, kv_cache={"keys": "fp8", "recent": 32})
    with pytest.raises(RequestError, match="fp8"):
        model.generate(prompt, max_new_tokens=2)


def test_a_disk_that_is_full_in_the_middle_of_a_text_is_a_sentence(
    tiny_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    policy = {**KEPT, "recent": 32, "offload": {"to": "disk", "directory": str(tmp_path)}}
    model = runtime.load(tiny_llama(), device="cpu", kv_cache=policy)
    own = os.posix_fallocate

    def full(handle: int, start: int, size: int) -> None:
        if size > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own(handle, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CompressError, match=rf"offload: {tmp_path} cannot hold .*No space left") as caught:
        model.generate(list(range(1, 90)), max_new_tokens=2)
    assert caught.value.exit_code == 1
    monkeypatch.undo()
    assert model.generate(list(range(1, 90)), max_new_tokens=2)


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("streamingllm", "evict.tokens: 1024 are no fewer than the longest sequence of this model, 1024 tokens"),
        ("rpc", "evict.interval: 1024 steps are no fewer than"),
        ({"select": {"method": "quest", "tokens": 2048}}, "select.tokens: 2048 are no fewer than"),
        ({"keys": "int4", "recent": 1020, "prefix": 4}, "recent: 1024 tokens that stay floats are no fewer than"),
        ("snapkv", None), ("kivi", None), ({"select": "quest"}, None), ({"recent": 4096}, None),
    ],
    ids=str,
)  # fmt: skip
def test_what_can_do_nothing_is_said(
    bundled: Path, policy: Any, wanted: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(bundled)
    assert config.max_position_embeddings == 1024
    found = Policy.parse(policy).idle(config)
    assert [sentence.startswith(wanted or "") for sentence in found] == ([True] if wanted else [])
    runtime.load(bundled, kv_cache=policy, device="cpu")
    said = [record.message for record in caplog.records if record.name == "compress.kv_cache"]
    assert said == [f"kv_cache.{sentence}" for sentence in found]
