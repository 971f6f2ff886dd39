"""Quality through a compressed cache: against transformers token by token, and what policies that lose much are found to lose."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import runtime
from compress.cli import main
from compress.core.resources import bundled_text
from compress.evaluate import evaluate
from compress.evaluate.through_cache import through_cache
from runtime.errors import RequestError

LENGTH, PROMPT = 128, 96
FEW = {"evict": {"score": "snapkv", "ratio": 0.15, "observe": 8}, "keys": "int2", "values": "int2", "recent": 8}


@pytest.fixture(scope="module")
def windows(bundled):
    from transformers import AutoTokenizer

    text = bundled_text("heldout").read_text(encoding="utf-8")[:20_000]
    ids = AutoTokenizer.from_pretrained(bundled)(text).input_ids
    return torch.tensor(ids[: 5 * LENGTH]).view(5, LENGTH)


@pytest.fixture(scope="module")
def load(bundled):
    return lambda policy: runtime.load(bundled, device="cpu", dtype="float32", kv_cache=policy)


@pytest.fixture(scope="module")
def token_by_token(bundled, windows):
    """Perplexity of the tokens after the prompt and one more, decoded one at a time by transformers over its own cache."""
    model = AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32)
    cache, nll = DynamicCache(config=model.config), 0.0
    with torch.no_grad():
        model(windows[:, :PROMPT], past_key_values=cache)
        for place in range(PROMPT, LENGTH - 1):
            logits = model(windows[:, place : place + 1], past_key_values=cache).logits[:, -1]
            nll += float(torch.nn.functional.cross_entropy(logits, windows[:, place + 1], reduction="sum"))
    return math.exp(nll / (len(windows) * (LENGTH - 1 - PROMPT)))


def test_a_plain_policy_gives_what_transformers_gives(load, windows, token_by_token):
    found = through_cache(load({}), windows, batch_size=2)
    assert found["perplexity_with_cache"] == pytest.approx(token_by_token, rel=1e-4)
    assert found["perplexity_increase_with_cache"] == pytest.approx(0, abs=1e-4)
    facts = found["kv_cache"]
    assert facts["plain_perplexity"] == pytest.approx(token_by_token, rel=1e-4)
    assert facts["kl"] < 1e-6
    assert (facts["tokens"], facts["sequence_length"], facts["prompt_tokens"]) == (5 * 31, LENGTH, PROMPT)
    assert facts["cache_bytes"] >= facts["full_bytes"]
    assert "warning" not in facts


def test_few_bits_of_few_tokens_are_worse_and_few_bits_alone_hardly(load, windows, token_by_token):
    few = through_cache(load(FEW), windows)
    mild = through_cache(load({"keys": "int8", "values": "int8", "recent": 0}), windows)
    assert few["perplexity_increase_with_cache"] > 0.02
    assert few["perplexity_with_cache"] > 1.02 * token_by_token
    assert abs(mild["perplexity_increase_with_cache"]) < 0.01
    assert few["kv_cache"]["kl"] > 10 * mild["kv_cache"]["kl"] > 0
    # Of two pages of tokens one is left; in few bits a page is plain beside, so near the end of so short a window.
    floats = through_cache(load({"evict": FEW["evict"]}), windows)["kv_cache"]
    assert floats["cache_bytes"] < 0.6 * floats["full_bytes"]


@pytest.mark.parametrize("policy", [FEW, {"evict": {"score": "streaming", "tokens": 32, "interval": 16}}])
def test_rows_at_once_do_not_matter(load, windows, policy):
    model = load(policy)
    one, all_ = (through_cache(model, windows, batch_size=rows)["perplexity_with_cache"] for rows in (1, 5))
    assert one == pytest.approx(all_, rel=1e-4)


def test_what_happens_while_decoding_counts(load, windows):
    streaming = {"score": "streaming", "tokens": 32}
    once, often = (
        through_cache(load({"evict": {**streaming, "interval": interval}}), windows) for interval in (None, 16)
    )
    assert often["perplexity_with_cache"] != pytest.approx(once["perplexity_with_cache"], rel=1e-4)
    chosen = through_cache(load({"select": {"method": "tidal", "ratio": 0.25}}), windows)
    assert 0 < chosen["kv_cache"]["read_share"] < 1
    assert chosen["kv_cache"]["kl"] > 1e-4


def test_windows_that_show_little_are_said_so(load, windows):
    text = through_cache(load({"keys": "int4", "recent": 128}), windows)["kv_cache"]["warning"]
    assert "no smaller than a plain one" in text
    rarely = {"evict": {"score": "streaming", "tokens": 32, "interval": 64}}
    assert "no more than the interval of 64" in through_cache(load(rarely), windows)["kv_cache"]["warning"]


def test_without_a_policy_nothing_is_measured(load, windows):
    assert "perplexity_with_cache" not in evaluate(load(False), windows=windows)
    with pytest.raises(RequestError, match="plain cache"):
        through_cache(load(False), windows)
    with pytest.raises(RequestError, match="2 tokens"):
        through_cache(load({}), windows[:, :2])


def test_a_policy_changes_nothing_that_is_measured_of_whole_windows(bundled, windows):
    options = {"device": "cpu", "dtype": "float32"}
    plain = evaluate(bundled, windows=windows, load_options=options)
    held = evaluate(bundled, windows=windows, reference=bundled, load_options={**options, "kv_cache": FEW})
    assert held["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-4)
    assert held["reference"]["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-4)
    assert abs(held["perplexity_increase"]) < 1e-3 < held["perplexity_increase_with_cache"]


class TestCommands:
    OPTIONS = ("--samples", "2", "--sequence-length", "128", "--device", "cpu")

    def test_eval(self, bundled, tmp_path, capsys):
        file = tmp_path / "few.json"
        file.write_text(json.dumps(FEW), encoding="utf-8")
        for policy in (json.dumps(FEW), str(file)):
            assert main(["eval", str(bundled), *self.OPTIONS, "--kv-cache", policy, "--json"]) == 0
            result = json.loads(capsys.readouterr().out)
            assert result["kv_cache"]["policy"] == "snapkv to 0.15 of the tokens; keys int2, values int2"
            assert result["perplexity_with_cache"] > result["kv_cache"]["plain_perplexity"]
        assert main(["eval", str(bundled), *self.OPTIONS, "--kv-cache", "kivi"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "KV cache: keys int2, values int2: " in shown
        assert "with a plain cache" in shown
        assert main(["eval", str(bundled), *self.OPTIONS, "--kv-cache", "none", "--json"]) == 0
        assert "kv_cache" not in json.loads(capsys.readouterr().out)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--kv-cache", "kiwi"), "did you mean 'kivi'"),
            (("--kv-cache", '{"keys": "int3"}'), "unknown codec"),
            (("--kv-cache", "nowhere.json"), "nowhere.json"),
            (("--kv-cache", "duoattention"), "needs gates"),
            (("--kv-cache", "kivi", "--sequence-length", "2"), "windows of 2 tokens are too short"),
            (("--kv-cache", "kivi", "--tasks", "arc_easy"), "--kv-cache cannot be used with --tasks"),
        ],
    )
    def test_nonsense_is_refused(self, bundled, capsys, options, message):
        assert main(["eval", str(bundled), "--samples", "1", "--device", "cpu", *options]) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.slow
    @pytest.mark.usefixtures("warm")
    def test_bench_says_what_steps_read(self, bundled, capsys):
        options = ["-p", "400", "-n", "4", "--repeat", "1", "--device", "cpu", "--threads", "1"]
        policy = '{"select": {"method": "tidal", "ratio": 0.25}}'
        assert main(["bench", str(bundled), *options, "--kv-cache", policy]) == 0
        assert "share of cached tokens read per step" in capsys.readouterr().out
        assert main(["bench", str(bundled), *options, "--kv-cache", "kivi", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["kv_cache_read_share"] is None
