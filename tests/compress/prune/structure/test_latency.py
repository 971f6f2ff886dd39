"""The budget of latency: how few times are measured, what follows from them, and what is told; no test asks how fast this machine is."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCABULARY, byte_tokenizer
from encoder_models import bert, save, t5
from transformers import AutoConfig, AutoModelForCausalLM

import compress
from compress.evaluate import speed as token_time
from compress.model.config_sizes import resized
from compress.model.streamed import StreamedModel
from compress.prune.structure import amount as latency
from compress.prune.structure.amount import Latency, depths, rising
from compress.recipe import load as load_recipe
from compress.run.plan import make_plan
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def seconds(config: Any) -> float:
    """A machine whose time is that of so many multiplications, and something beside."""
    text = config if isinstance(config, dict) else config.to_dict()
    layer = 3.0 * text["intermediate_size"] + 40.0 * text["num_attention_heads"]
    return 1e-3 + 1e-6 * (text["num_hidden_layers"] * layer + 500)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the clock by `seconds`; gives what was timed."""
    timed: list[Path] = []

    def token_time(path: Path, device: torch.device) -> float:
        timed.append(path)
        assert sum(file.stat().st_blocks for file in path.glob("*.safetensors")) * 512 < 2**20  # zeros take no room
        return seconds(json.loads((path / "config.json").read_text()))

    monkeypatch.setattr(latency, "token_time", token_time)
    return timed


def stage(method: str = "magnitude", **fields: Any) -> dict[str, Any]:
    return {"structure": {"method": method, **fields}}


def test_few_models_are_timed_and_all_numbers_follow(make_checkpoint: Callable[..., Path]) -> None:
    streamed = StreamedModel(Checkpoint(make_checkpoint(num_hidden_layers=7)))
    asked: list[tuple[int, int]] = []

    def measure(configs: Any) -> list[float]:
        asked.extend((config.num_hidden_layers, config.intermediate_size) for config in configs)
        return [seconds(config) for config in configs]

    found = Latency(streamed, "ffn", range(8, 97, 8), measure)
    times = [found(count) for count in range(8, 97, 8)]
    expected = [seconds(resized(streamed.config, "ffn", count)) for count in range(8, 97, 8)]
    assert times == pytest.approx(expected)
    assert asked == [(depth, width) for width in (8, 24, 48, 72, 96) for depth in (1, 3)]
    facts = json.loads(json.dumps(found.facts(64)))
    assert facts["of"] == "a decoded token"
    assert facts["layers"] == [1, 3]
    assert list(facts["seconds"]) == ["8", "24", "48", "72", "96"]
    assert (facts["before"], facts["after"]) == pytest.approx((expected[-1], expected[7]))


def test_noise_never_makes_more_units_faster(make_checkpoint: Callable[..., Path]) -> None:
    streamed = StreamedModel(Checkpoint(make_checkpoint()))
    generator = torch.Generator().manual_seed(5)

    def measure(configs: Any) -> list[float]:
        return [seconds(config) * float(1 + 0.5 * torch.rand(1, generator=generator)) for config in configs]

    for remove, choices in (("ffn", range(4, 97, 4)), ("layers", range(1, 4)), ("heads", range(1, 3))):
        found = Latency(streamed, remove, choices, measure)  # type: ignore[arg-type]
        times = [found(count) for count in choices]
        assert all(before <= after for before, after in itertools.pairwise(times))


def test_layers_add_the_same_each(make_checkpoint: Callable[..., Path]) -> None:
    streamed = StreamedModel(Checkpoint(make_checkpoint(num_hidden_layers=9)))
    found = Latency(streamed, "layers", range(1, 10), lambda configs: [seconds(c) for c in configs])
    assert [found(count) for count in range(1, 10)] == pytest.approx(
        [seconds(resized(streamed.config, "layers", count)) for count in range(1, 10)]
    )
    assert found.facts(4)["layers"] == [1, 3]


@pytest.mark.parametrize("length", range(1, 6))
def test_rising_is_the_nearest_sequence_that_never_falls(length: int) -> None:
    """No sequence of whole numbers is nearer. The nearest of all is one, as any mean of up to five of these times is whole."""
    for times in itertools.product((0, 60, 120), repeat=length):
        found = rising(times)
        assert len(found) == length
        assert found == sorted(found)
        least = [0] * 121  # squares of what comes before, where it ends with each number or less
        for time in times:
            least = list(itertools.accumulate((before + (n - time) ** 2 for n, before in enumerate(least)), min))
        assert sum((own - time) ** 2 for own, time in zip(found, times, strict=True)) == least[-1], times


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"num_hidden_layers": 8}, (1, 3)),
        ("llama", {"num_hidden_layers": 2}, (1, 2)),
        ("llama", {"num_hidden_layers": 1}, (1,)),
        ("qwen2_moe", {"num_hidden_layers": 8, "mlp_only_layers": [0, 1]}, (3, 5)),  # two dense ones first
        ("qwen2_moe", {"num_hidden_layers": 8, "decoder_sparse_step": 2}, (2, 4)),  # by turns
        ("qwen2_moe", {"num_hidden_layers": 6, "mlp_only_layers": [0, 3]}, (3, 6)),
        ("qwen2_moe", {"num_hidden_layers": 6, "mlp_only_layers": [0, 1, 3, 5]}, (3, 5)),
        ("qwen2_moe", {"num_hidden_layers": 6, "mlp_only_layers": [5]}, (3, 6)),  # no order
    ],
)
def test_layers_that_are_timed_stand_for_those_that_follow(
    tmp_path: Path, family: str, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    settings = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        **({"num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16} if "moe" in family else {}),
    }  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings, **changes)).save_pretrained(tmp_path)
    assert depths(StreamedModel(Checkpoint(tmp_path)), changes["num_hidden_layers"]) == expected


@pytest.mark.parametrize(
    ("fields", "shape"),
    [({"remove": "ffn", "multiple": 4}, "intermediate_size"), ({"remove": "layers"}, "num_hidden_layers")],
)
def test_the_largest_model_within_the_budget_is_kept(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, clock: list[Path], fields: dict[str, Any], shape: str
) -> None:
    source = make_checkpoint(num_hidden_layers=5)
    request = recipe(source, stage(budget={"latency": "80%"}, **fields))
    plan = make_plan(load_recipe(request), tmp_path / "out")
    assert "latency measured: a decoded token" in plan.passes[0]
    assert f"-> about {plan.passes[0].split('about ')[1].split(' ')[0]} ms" in plan.passes[0]
    timed = len(clock)
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert len(clock) == timed  # what is known is not measured again
    config = json.loads((source / "config.json").read_text())
    step = fields.get("multiple", 1)
    wanted = max(
        count
        for count in range(step, config[shape], step)
        if seconds({**config, shape: count}) <= 0.8 * seconds(config) + 1e-12
    )
    (facts,) = made.manifest["passes"]
    assert facts["after"] == wanted == json.loads((made.path / "config.json").read_text())[shape]
    measured = facts["measured"]
    assert measured["before"] == pytest.approx(seconds(config))
    assert measured["after"] == pytest.approx(seconds({**config, shape: wanted}))
    assert measured["after"] <= 0.8 * measured["before"]
    assert measured["device"] == "cpu"


def test_a_budget_that_cannot_be_kept_says_what_is_left(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, clock: list[Path]
) -> None:
    request = recipe(make_checkpoint(), stage(budget={"latency": "20%"}, remove="ffn", multiple=8))
    told = (
        r"structure\.budget\.latency: with 8 of 96 channels .* of its latency: a decoded token takes .* ms instead of .* ms\. "
        r"What was measured is kept in .*latency; delete"
    )
    with pytest.raises(RequestError, match=told):
        compress.apply(request, output=tmp_path / "out", quiet=True)


def test_what_cannot_be_timed_is_said(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token_time(path: Path, device: torch.device) -> float:
        raise ValueError("no cache of this kind")

    monkeypatch.setattr(latency, "token_time", token_time)
    request = recipe(make_checkpoint(), stage(budget={"latency": "70%"}, remove="ffn", multiple=8))
    with pytest.raises(RequestError, match=r"budget\.latency: .*LlamaForCausalLM"):
        compress.apply(request, output=tmp_path / "out", quiet=True)


def test_a_run_does_not_go_on_to_another_number(
    make_checkpoint: Any,
    recipe: Any,
    interrupted: Callable[..., Path],
    clock: list[Path],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = recipe(make_checkpoint(), stage(budget={"latency": "85%"}, remove="ffn", multiple=4))
    output = interrupted(request, 1)
    known = cache.with_name("known")
    shutil.move(cache, known)
    # The clock of another day: channels cost more.
    monkeypatch.setattr(
        latency, "token_time", lambda path, _: seconds(json.loads((path / "config.json").read_text())) ** 1.5
    )
    with pytest.raises(CompressError, match="--overwrite"):
        compress.apply(request, output=output, resume=True, quiet=True)
    shutil.rmtree(cache)
    shutil.move(known, cache)
    made = compress.apply(request, output=output, resume=True, quiet=True)
    assert made.manifest["passes"][0]["after"] < 96


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder-decoder"])
def test_real_models_of_zeros_are_timed_once(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(latency, "SWEEPS", 1)
    monkeypatch.setattr(token_time, "SECONDS", 0.0)
    if kind == "decoder":
        source = make_checkpoint("gemma2", num_hidden_layers=4)
    else:
        source = save(bert() if kind == "encoder" else t5(), tmp_path / "source")
    byte_tokenizer().save_pretrained(source)
    streamed = StreamedModel(Checkpoint(source))
    found = Latency(streamed, "ffn", range(32, 97, 32))
    times = [found(count) for count in range(32, 97, 32)]
    assert all(0 < time < 10 for time in times)
    assert times == sorted(times)
    assert found.facts(64)["of"] == ("a text of 128 tokens" if kind == "encoder" else "a decoded token")

    def clock(path: Path, device: torch.device) -> float:
        raise AssertionError("it is known")

    monkeypatch.setattr(latency, "token_time", clock)
    assert [Latency(streamed, "ffn", range(32, 97, 32))(count) for count in range(32, 97, 32)] == times


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[Path]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "file"))
    streamed = StreamedModel(Checkpoint(make_checkpoint()))
    assert Latency(streamed, "ffn", range(32, 97, 32))(96) > 0
    assert clock
