"""Metrics against a plain float64 computation, and evaluation against transformers."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from random_models import UNLIMITED

import compress
import runtime
from compress.evaluate import TokenMetrics, evaluate, metrics, parameter_count
from runtime.checkpoint.artifact import Artifact
from runtime.errors import CompressError, RequestError


def plain(logits, targets, reference):
    """The definitions, in float64 and in one piece."""
    ours = torch.log_softmax(logits.double(), -1)
    base = torch.log_softmax(reference.double(), -1)
    nll = -ours[torch.arange(len(targets)), targets].mean().item()
    kl = (base.exp() * (base - ours)).sum(-1).mean().item()
    return nll, kl, (ours.argmax(-1) == base.argmax(-1)).double().mean().item()


@pytest.fixture(scope="module")
def model(tiny_llama):
    return runtime.load(tiny_llama(), device="cpu", dtype="float32")


class TestTokenMetrics:
    @pytest.fixture
    def pieces(self):
        torch.manual_seed(0)
        return torch.randn(50, 97) * 3, torch.randint(0, 97, (50,)), torch.randn(50, 97) * 3

    @pytest.mark.parametrize("chunk", [97, 97 * 7, 2**20])
    def test_against_plain_float64(self, pieces, chunk, monkeypatch):
        monkeypatch.setattr(metrics, "CHUNK_VALUES", chunk)
        logits, targets, reference = pieces
        found = TokenMetrics()
        found.add(logits[:20], targets[:20], reference[:20])
        found.add(logits[20:], targets[20:], reference[20:])
        nll, kl, agreement = plain(logits, targets, reference)
        result = found.result()
        assert result["nll"] == pytest.approx(nll, rel=1e-6)
        assert result["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
        assert result["kl"] == pytest.approx(kl, rel=1e-5)
        assert result["top1_agreement"] == agreement
        assert result["tokens"] == 50

    def test_uniform_logits_have_the_vocabulary_as_perplexity(self):
        found = TokenMetrics()
        found.add(torch.zeros(10, 321), torch.arange(10))
        assert found.result()["perplexity"] == pytest.approx(321, rel=1e-5)
        assert "kl" not in found.result()

    def test_a_model_agrees_with_itself(self, pieces):
        logits, targets, _ = pieces
        found = TokenMetrics()
        found.add(logits, targets, logits)
        assert found.result()["kl"] == 0.0
        assert found.result()["top1_agreement"] == 1.0

    def test_kl_is_reference_first(self):
        reference = torch.tensor([[0.0, 0.0]])  # 1/2, 1/2
        logits = torch.log(torch.tensor([[0.25, 0.75]]))
        found = TokenMetrics()
        found.add(logits, torch.tensor([0]), reference)
        expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
        assert found.result()["kl"] == pytest.approx(expected, rel=1e-5)

    def test_ids_that_only_one_model_has_are_not_compared(self, pieces):
        logits, targets, reference = pieces
        targets = targets.clamp(max=89)
        wide = TokenMetrics()
        wide.add(torch.cat([logits[:, :90], torch.full((50, 7), 9.0)], 1), targets, reference[:, :90])
        narrow = TokenMetrics()
        narrow.add(logits[:, :90], targets, reference[:, :90])
        assert wide.result()["kl"] == pytest.approx(narrow.result()["kl"], rel=1e-6)
        assert wide.result()["nll"] > narrow.result()["nll"]  # perplexity is over all ids the model has

    def test_tokens_ruled_out_by_both_add_nothing(self):
        logits = torch.tensor([[1.0, 2.0, -math.inf]])
        found = TokenMetrics()
        found.add(logits, torch.tensor([1]), logits)
        assert found.result()["kl"] == 0.0

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_not_a_number_is_an_error(self, bad):
        found = TokenMetrics()
        with pytest.raises(CompressError, match="NaN"):
            found.add(torch.tensor([[1.0, bad]]), torch.tensor([0]))

    def test_certain_and_wrong_is_infinitely_perplexed(self):
        found = TokenMetrics()
        found.add(torch.tensor([[0.0, -5000.0]]), torch.tensor([1]))
        assert found.result()["perplexity"] == math.inf

    def test_nothing_added(self):
        with pytest.raises(CompressError, match="tokens"):
            TokenMetrics().result()


class TestEvaluate:
    def test_against_transformers(self, model, tiny_llama, tiny_text):
        from transformers import AutoModelForCausalLM

        result = evaluate(model, tiny_text, sequence_length=32, samples=6, batch_size=4)
        ids = torch.tensor(model.tokenizer(tiny_text.read_text())["input_ids"][: 6 * 32]).view(6, 32)
        expected = AutoModelForCausalLM.from_pretrained(tiny_llama(), dtype=torch.float32)
        with torch.no_grad():
            nll = expected(input_ids=ids, labels=ids).loss.item()
        assert result["nll"] == pytest.approx(nll, rel=1e-4)
        assert result["tokens"] == 6 * 31
        assert (result["windows"], result["sequence_length"]) == (6, 32)
        assert result["tokens_per_second"] > 0

    def test_batch_size_does_not_matter(self, model, tiny_text):
        one, four = (evaluate(model, tiny_text, sequence_length=32, samples=5, batch_size=n)["nll"] for n in (1, 4))
        assert one == pytest.approx(four, rel=1e-5)

    def test_given_windows(self, model):
        windows = torch.arange(40).view(4, 10)
        result = evaluate(model, windows=windows)
        assert result["tokens"] == 36

    def test_reference_is_the_model_itself(self, model, tiny_text):
        result = evaluate(model, tiny_text, samples=4, reference=model)
        assert result["kl"] == 0.0
        assert result["top1_agreement"] == 1.0
        assert result["perplexity_increase"] == 0.0
        assert result["sequence_length"] == 128  # the model's context is shorter than 256

    def test_artifact_against_its_source_is_what_the_pipeline_measured(self, tiny_artifact, tiny_llama, tiny_text):
        manifest = Artifact(tiny_artifact).manifest
        options = {"device": "cpu", "kernels": "reference"}
        result = evaluate(
            tiny_artifact, tiny_text, sequence_length=64, samples=8, reference=tiny_llama(), load_options=options
        )
        assert result["perplexity"] == pytest.approx(manifest["metrics"]["after"]["perplexity"], rel=2e-3)
        assert result["kl"] == pytest.approx(manifest["metrics"]["kl"], rel=2e-2)
        assert result["kl"] > 0
        assert result["bits_per_weight"] < result["reference"]["bits_per_weight"] == 16.0

    def test_parameters_are_counted_once_when_tied(self, tiny_llama):
        from transformers import AutoModelForCausalLM

        expected = AutoModelForCausalLM.from_pretrained(tiny_llama()).num_parameters()
        assert parameter_count(Artifact(tiny_llama())) == expected

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sequence_length": 1000}, "more than the model's context of 128"),
            ({"sequence_length": 1}, "greater than or equal to 2"),
            ({"samples": 0}, "greater than or equal to 1"),
            ({"batch_size": 0}, "batch_size must be at least 1"),
            ({"text": "nowhere/text.txt"}, "no file 'nowhere/text.txt'"),
            ({"windows": torch.zeros(4, dtype=torch.int64)}, "windows must be"),
        ],
    )
    def test_wrong_requests(self, model, options, message):
        with pytest.raises(RequestError, match=message):
            evaluate(model, **options)

    def test_text_shorter_than_a_window(self, model, tmp_path):
        (tmp_path / "short.txt").write_text("short")
        with pytest.raises(RequestError, match="row"):
            evaluate(model, tmp_path / "short.txt")

    def test_another_tokenizer_cannot_be_compared(self, model, tiny_llama, tmp_path):
        other = shutil.copytree(tiny_llama(), tmp_path / "other")
        text = (other / "tokenizer.json").read_text(encoding="utf-8")
        (other / "tokenizer.json").write_text(
            text.replace('"a":', '"swap":').replace('"b":', '"a":').replace('"swap":', '"b":')
        )
        with pytest.raises(RequestError, match="tokenizer"):
            evaluate(model, reference=other)


@pytest.mark.parametrize("target", ["model.embed_tokens", "lm_head"])
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_heads_are_compared_with_the_originals(tied, target, tiny_llama, tiny_text, tmp_path):
    """What is rounded in place before the blocks run is not what the artifact is compared with."""
    source = str(tiny_llama(tie_word_embeddings=tied))
    text = {**UNLIMITED, "data": str(tiny_text), "sequence_length": 64, "samples": 4, "max_perplexity_increase": "900%"}

    def metrics_of(name):
        stage = {"quantize": {"method": "rtn", "bits": 2, "group_size": 32, "targets": [name]}}
        recipe = {"name": "outside", "model": source, "stages": [stage], "evaluate": text}
        return compress.apply(recipe, output=tmp_path / name, quiet=True).metrics

    inside, outside = metrics_of("model.layers.0.mlp.up_proj"), metrics_of(target)
    assert outside["before"] == inside["before"]
    assert outside["after"] != outside["before"]
    assert outside["kl"] > 1e-5
