"""Whole runs on tiny encoders and encoder-decoders: every tensor accounted for, and the artifact is the dequantized model."""

from __future__ import annotations

import json

import pytest
import torch
from encoder_models import bert, save, t5
from random_models import UNLIMITED
from safetensors.torch import load_file, save_file

import compress
import runtime
from compress.model.streamed import StreamedModel, run_blocks
from compress.recipe import load as load_recipe
from compress.run.plan import make_plan
from compress.run.run import LimitError
from compress.weights import block_pass
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError
from runtime.layers.compressed_linear import CompressedLinear

W8A8 = {"quantize": {"method": "rtn", "scheme": "W8A8-INT8"}}
STAGES = {
    "rtn": W8A8,
    "smoothquant": {"quantize": {"method": "smoothquant", "scheme": "W8A8-INT8"}},
    "static": {"quantize": {"method": "smoothquant", "scheme": "W8A8-INT8", "activation_mode": "static"}},
    "gptq": {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}},
    "awq": {"quantize": {"method": "awq", "scheme": "W4A16", "group_size": 32}},
    "sparse": {"prune": {"method": "sparsegpt", "pattern": "2:4"}},
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save(bert(), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def seq2seq(tmp_path_factory):
    # Untied, so that its logits are no longer scaled down and say something.
    return save(t5(num_decoder_layers=3, tie_word_embeddings=False), tmp_path_factory.mktemp("t5"))


def _dense(path):
    """The artifact as transformers' own model with dequantized weights; inputs are quantized by the reference kernel."""
    engine = runtime.load(path, kernels="reference").engine
    module = engine.module
    for name, layer in list(module.named_modules()):
        if isinstance(layer, CompressedLinear):
            assert layer.entry.scheme.activations is None
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, layer.dense())
    return module


@pytest.mark.parametrize("name", STAGES)
@torch.no_grad()
def test_an_encoder_is_compressed(encoder, recipe, tmp_path, name):
    evaluate = {"data": recipe(encoder)["calibration"]["data"], "sequence_length": 32, "samples": 8, "min_cosine": 0.5}
    applied = compress.apply(recipe(encoder, STAGES[name], evaluate=evaluate), output=tmp_path / "out", quiet=True)
    tensors = applied.manifest["tensors"]
    assert set(tensors) == set(Checkpoint(encoder).names())
    assert sum(entry["action"] == "compressed" for entry in tensors.values()) == 2 * 6
    assert tensors["pooler.dense.weight"]["action"] == "copied"
    cosine = applied.metrics["cosine"]
    assert 0.9 < cosine["min"] <= cosine["mean"] < 1 - 1e-9
    assert [limit["name"] for limit in applied.metrics["limits"]] == ["min_cosine"]
    assert "cosine" in (tmp_path / "out" / "report.html").read_text()
    model, source = runtime.load(tmp_path / "out"), runtime.load(encoder)
    ids = torch.randint(0, 256, (2, 20))
    states = model.hidden_states(ids)
    assert not torch.equal(states, source.hidden_states(ids)), "nothing was compressed"
    if name in ("gptq", "awq", "sparse"):
        expected = _dense(tmp_path / "out")(ids).last_hidden_state
        torch.testing.assert_close(states, expected, atol=2e-3, rtol=2e-3)
    texts = ["a small cat", "the moon and everything below it", "x"]
    together = model.embed(texts)
    for number, text in enumerate(texts):
        torch.testing.assert_close(model.embed(text)[0], together[number], atol=2e-2, rtol=2e-2)
    assert float((together * source.embed(texts)).sum(1).min()) > 0.9


def test_smoothquant_folds_what_can_be_folded_in_bert(encoder, recipe, tmp_path):
    """The norms of BERT also feed the residual, so they can take no scale; values can, for the layer that reads the attention."""
    compress.apply(recipe(encoder, STAGES["smoothquant"]), output=tmp_path / "out", quiet=True)
    log = (tmp_path / "out" / "compress.log").read_text()
    for layer in ("attention.self.query", "intermediate.dense", "output.dense"):
        assert f"encoder.layer.0.{layer}: nothing before it can take a scale" in log
    assert "encoder.layer.0.attention.output.dense: nothing" not in log
    after, before = Checkpoint(tmp_path / "out"), Checkpoint(encoder)
    same_kind = [n for n in before.names() if n.endswith(".bias") or "LayerNorm" in n]
    changed = {n for n in same_kind if not torch.equal(after.get(n), before.get(n))}
    assert {name.rpartition(".")[0].partition(".layer.")[2][2:] for name in changed} == {"attention.self.value"}


def test_int8_weights_are_within_a_step_of_the_source(encoder, recipe, tmp_path):
    """Rounding to nearest with a scale a row; the scale may clip the largest weight, by less than a step."""
    compress.apply(recipe(encoder, W8A8), output=tmp_path / "out", quiet=True)
    source = Checkpoint(encoder).get("encoder.layer.1.output.dense.weight")
    module = runtime.load(tmp_path / "out", kernels="reference").engine.module
    dense = module.encoder.layer[1].output.dense.dequantize()
    step = source.abs().amax(1, keepdim=True) / 127
    assert float(((dense - source).abs() / step).max()) < 1.01


@torch.no_grad()
def test_calibration_sees_no_padding(encoder, recipe, tmp_path, text):
    """Rows of one document each, padded: the mask reaches the blocks, so the artifact does not depend on what is at padding."""
    lines = tmp_path / "documents.txt"
    lines.write_text("\n\n".join(f"document {i} " + "word " * (i % 4) for i in range(12)), encoding="utf-8")
    made = []
    for fill in ("a", "b"):
        calibration = {"data": str(lines), "samples": 8, "sequence_length": 32, "batch_size": 4, "packing": False}
        path = save(bert(), tmp_path / f"model-{fill}")
        settings = json.loads((path / "tokenizer_config.json").read_text())
        settings["pad_token"] = {"a": "[PAD]", "b": "[SEP]"}[fill]
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        compress.apply(
            recipe(path, STAGES["gptq"], calibration=calibration), output=tmp_path / f"out-{fill}", quiet=True
        )
        made.append(Checkpoint(tmp_path / f"out-{fill}"))
    for name in made[0].names():
        assert torch.equal(made[0].get(name), made[1].get(name)), name


@torch.no_grad()
def test_other_names_are_accounted_for(recipe, tmp_path):
    source = bert()
    path = save(source, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    renamed = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    renamed |= {"bert.embeddings.position_ids": torch.arange(64)[None], "cls.predictions.bias": torch.zeros(260)}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    applied = compress.apply(recipe(path, W8A8), output=tmp_path / "out", quiet=True)
    account = applied.manifest["tensors"]
    assert {entry.get("source_name", name) for name, entry in account.items()} == set(renamed)
    dropped = {name for name, entry in account.items() if entry["action"] == "dropped"}
    assert dropped == {"bert.embeddings.position_ids", "cls.predictions.bias"}
    assert account["embeddings.LayerNorm.weight"]["source_name"] == "bert.embeddings.LayerNorm.gamma"
    ids = torch.randint(0, 256, (2, 9))
    states, expected = runtime.load(tmp_path / "out").hidden_states(ids), source(ids).last_hidden_state
    assert float((states - expected).norm() / expected.norm()) < 0.05
    renamed["bert.encoder.layer.9.output.dense.bias"] = torch.zeros(64)
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"encoder\.layer\.9\.output\.dense\.bias"):
        compress.apply(recipe(path, W8A8), output=tmp_path / "more", quiet=True)


def test_pooling_files_come_along_and_are_verified(recipe, tmp_path):
    path = save(bert(), tmp_path / "model")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    modules = [{"type": "models.Transformer", "path": ""}, {"type": "models.Pooling", "path": "1_Pooling"}]
    (path / "modules.json").write_text(json.dumps(modules))
    compress.apply(recipe(path, W8A8), output=tmp_path / "out", quiet=True)
    assert runtime.load(tmp_path / "out").pooling.mode == "cls"
    Artifact(tmp_path / "out").verify()
    (tmp_path / "out" / "1_Pooling" / "config.json").write_text("{}")
    with pytest.raises(RequestError, match="1_Pooling"):
        runtime.load(tmp_path / "out")


def test_limits_and_plan_of_an_encoder(encoder, recipe, tmp_path, text):
    evaluate = {
        **UNLIMITED,
        "data": str(text),
        "sequence_length": 32,
        "samples": 4,
        "max_perplexity_increase": "1%",
        "min_cosine": 1.0,
    }
    wanted = recipe(encoder, W8A8, evaluate=evaluate)
    plan = make_plan(load_recipe(wanted), tmp_path / "out")
    assert any("max_perplexity_increase is not checked" in warning for warning in plan.warnings)
    assert {t.name for t in plan.tensors} == set(Checkpoint(encoder).names())
    with pytest.raises(LimitError, match="min_cosine"):
        compress.apply(wanted, output=tmp_path / "out", quiet=True)
    assert runtime.load(tmp_path / "out").embed("it is there all the same").shape == (1, 64)


# -------------------------------------------------------------------- encoder-decoders
@torch.no_grad()
def test_streamed_stacks_are_the_whole_model(seq2seq):
    streamed = StreamedModel(Checkpoint(seq2seq))
    reference = runtime.load(seq2seq).engine.module
    ids = torch.randint(0, 256, (3, 21))
    batches = [(ids[:2], None), (ids[2:], None)]
    states = run_blocks(streamed, batches, None)
    for number, (rows, _) in enumerate(batches):
        source, target = streamed.rows.source(rows), streamed.rows.target(rows)
        expected = reference(input_ids=source, decoder_input_ids=target).logits
        torch.testing.assert_close(streamed.outputs(states.get(number), rows), expected, atol=1e-3, rtol=1e-3)
        assert torch.equal(streamed.rows.labels(rows), target[:, 1:])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["rtn", "gptq", "smoothquant", "sparse"])
@torch.no_grad()
def test_an_encoder_decoder_is_compressed(seq2seq, recipe, tmp_path, name):
    evaluate = {"data": recipe(seq2seq)["calibration"]["data"], "sequence_length": 32, "samples": 8}
    evaluate |= {**UNLIMITED, "max_kl": 1.0}
    applied = compress.apply(recipe(seq2seq, STAGES[name], evaluate=evaluate), output=tmp_path / "out", quiet=True)
    tensors = applied.manifest["tensors"]
    assert set(tensors) == set(Checkpoint(seq2seq).names())
    # 4 of attention and 2 of the feed forward; 4 more of cross-attention in the decoder.
    assert sum(entry["action"] == "compressed" for entry in tensors.values()) == 2 * 6 + 3 * 10
    assert 0 < applied.metrics["kl"] < 1
    assert applied.metrics["tokens"] == 8 * 16
    model, source = runtime.load(tmp_path / "out"), runtime.load(seq2seq)
    ids, target = torch.randint(0, 256, (2, 9)), torch.randint(0, 256, (2, 5))
    logits, before = model.logits(ids, target), source.logits(ids, target)
    assert not torch.equal(logits, before), "nothing was compressed"
    if name in ("gptq", "sparse"):
        expected = _dense(tmp_path / "out")(input_ids=ids, decoder_input_ids=target).logits
        assert float((logits - expected).norm() / expected.norm()) < 5e-3
    else:
        assert float((logits - before).norm() / before.norm()) < 0.2
    one, two = model.generate([[1, 2, 3], [4, 5, 6, 7, 8]], max_new_tokens=5, ignore_eos=True)
    assert len(one) == len(two) == 5


@pytest.mark.slow
def test_a_resumed_run_gives_the_same_bytes(seq2seq, recipe, tmp_path, monkeypatch):
    """Stopped in the middle of the decoder, whose blocks need the first one's position bias and the encoder's output."""
    wanted = recipe(seq2seq, STAGES["gptq"])
    compress.apply(wanted, output=tmp_path / "whole", quiet=True)
    for stop in (1, 2, 4):
        output = tmp_path / f"stopped-{stop}"
        one_block = block_pass.run_block

        def stopping(job, index, states, stop=stop, one_block=one_block):
            if index == stop:
                raise CompressError("stopped")
            return one_block(job, index, states)

        with monkeypatch.context() as patch:
            patch.setattr(block_pass, "run_block", stopping)
            with pytest.raises(CompressError, match="stopped"):
                compress.apply(wanted, output=output, quiet=True)
        compress.apply(wanted, output=output, resume=True, quiet=True)
        for file in sorted((tmp_path / "whole").glob("*.safetensors")):
            assert file.read_bytes() == (output / file.name).read_bytes(), (stop, file.name)


def test_what_cannot_be_done_is_refused_in_a_sentence(seq2seq, encoder, recipe, tmp_path):
    base = recipe(seq2seq)["calibration"]
    shared = save(t5(), tmp_path / "tied")
    for wanted, words in (
        (recipe(seq2seq, STAGES["gptq"], calibration={**base, "packing": False}), "packing"),
        (
            recipe(shared, {"quantize": {"method": "rtn", "scheme": "W8A16", "targets": ["shared"]}}),
            "shared",
        ),
        (recipe(encoder, STAGES["gptq"], calibration={**base, "sequence_length": 65}), r"calibration\.sequence_length"),
        (
            recipe(encoder, {"quantize": {"method": "rtn", "scheme": "W8A16", "targets": ["pooler.dense"]}}),
            r"pooler\.dense",
        ),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            compress.apply(wanted, output=tmp_path / "out", quiet=True)
        assert "\n" not in str(caught.value)
