"""Encoders: the kind of a checkpoint, hidden states and embeddings against transformers, pooling files, padding, bad input."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from encoder_models import bert, byte_tokenizer, save, t5
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, LlamaConfig, T5Config

import runtime
from runtime.api.encoder import EncoderModel
from runtime.api.pooling import read_pooling
from runtime.errors import ArtifactError, RequestError
from runtime.modeling.skeleton import build_skeleton, find_stacks, model_kind

TEXTS = ["a small cat", "the moon", "x", "a text that is quite a bit longer than the other ones here"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(bert(), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return runtime.load(checkpoint)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (BertConfig(architectures=["BertModel"]), "encoder"),
        (BertConfig(architectures=["BertForMaskedLM"]), "encoder"),
        (BertConfig(architectures=["BertForSequenceClassification"]), "encoder"),
        (BertConfig(), "encoder"),
        (BertConfig(architectures=["BertLMHeadModel"]), "decoder"),
        (BertConfig(is_decoder=True), "decoder"),
        (LlamaConfig(architectures=["LlamaForCausalLM"]), "decoder"),
        (LlamaConfig(architectures=["LlamaModel"]), "decoder"),
        (LlamaConfig(), "decoder"),
        (T5Config(architectures=["T5ForConditionalGeneration"]), "encoder-decoder"),
        (T5Config(architectures=["T5Model"]), "encoder-decoder"),
        (T5Config(architectures=["T5EncoderModel"]), "encoder"),
        (T5Config(), "encoder-decoder"),
    ],
)
def test_the_kind_is_found(config, kind):
    assert model_kind(config) == kind


def test_the_skeleton_is_the_named_class():
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 9,
    }
    for name in ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertLMHeadModel"):
        skeleton = build_skeleton(BertConfig(architectures=[name], **small), torch.float32)
        assert type(skeleton).__name__ == name
        assert [n for n, _ in find_stacks(skeleton)] == [f"{'' if name == 'BertModel' else 'bert.'}encoder.layer"]
    assert [n for n, _ in find_stacks(build_skeleton(t5().config, torch.float32))] == ["encoder.block", "decoder.block"]


@torch.no_grad()
def test_hidden_states_are_those_of_transformers(checkpoint, model):
    reference = AutoModel.from_pretrained(checkpoint).eval()
    ids = torch.randint(0, 256, (3, 11))
    assert isinstance(model, EncoderModel)
    states = model.hidden_states(ids)
    assert states.dtype == torch.float32
    torch.testing.assert_close(states, reference(ids).last_hidden_state)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    expected = reference(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(model.hidden_states(ids, mask)[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(states[1, :5], expected[1, :5], atol=1e-3), "the mask matters"


@torch.no_grad()
def test_embeddings_are_means_over_the_tokens(checkpoint, model):
    reference, tokenizer = AutoModel.from_pretrained(checkpoint).eval(), byte_tokenizer()
    expected = torch.stack(
        [reference(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].mean(0) for text in TEXTS]
    )
    torch.testing.assert_close(model.embed(TEXTS, normalize=False), expected, atol=1e-5, rtol=1e-5)
    ours = model.embed(TEXTS)
    torch.testing.assert_close(ours, torch.nn.functional.normalize(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.norm(dim=1), torch.ones(len(TEXTS)))
    assert model.stats["sequences"] == len(TEXTS)
    assert model.stats["tokens"] == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)


def test_a_text_gives_the_same_alone_and_in_a_batch(model):
    together = model.embed(TEXTS)
    for number, text in enumerate(TEXTS):
        torch.testing.assert_close(model.embed(text), together[number : number + 1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.embed(TEXTS, batch_size=2), together, atol=1e-5, rtol=1e-5)


def test_long_texts_are_cut(model):
    assert model.max_length == 64
    # [CLS], 62 bytes and [SEP]: what comes later is not read.
    torch.testing.assert_close(model.embed("y" * 62 + "tail"), model.embed("y" * 62 + "other"))
    assert not torch.allclose(model.embed("y" * 61 + "a"), model.embed("y" * 61 + "b"), atol=1e-3)


def _with_pooling(checkpoint, path, pooling, **settings):
    shutil.copytree(checkpoint, path)
    (path / "1_Pooling").mkdir()
    modules = [("", "models.Transformer"), ("1_Pooling", "models.Pooling"), ("2_Normalize", "models.Normalize")]
    entries = [
        {"idx": i, "path": folder, "type": f"sentence_transformers.{kind}"} for i, (folder, kind) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20, **settings}))
    return path


@pytest.mark.parametrize("mode", ["cls", "max", "mean"])
def test_pooling_is_what_the_checkpoint_says(checkpoint, tmp_path, mode):
    flags = {"cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens", "mean": "pooling_mode_mean_tokens"}
    pooling = {"word_embedding_dimension": 64} | {flag: name == mode for name, flag in flags.items()}
    model = runtime.load(_with_pooling(checkpoint, tmp_path / "model", pooling))
    assert model.max_length == 20
    for text in ("short", "longer than twenty tokens, so that it is cut"):
        states = model.hidden_states([byte_tokenizer()(text, truncation=True, max_length=20)["input_ids"]])[0]
        expected = {"cls": states[0], "max": states.amax(0), "mean": states.mean(0)}[mode]
        torch.testing.assert_close(model.embed([text, "x"], normalize=False)[0], expected, atol=1e-5, rtol=1e-5)


def test_the_default_prompt_and_lower_case_are_part_of_the_text(checkpoint, tmp_path):
    path = _with_pooling(checkpoint, tmp_path / "model", {"pooling_mode_mean_tokens": True}, do_lower_case=True)
    (path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "q: "}, "default_prompt_name": "query"})
    )
    plain = _with_pooling(checkpoint, tmp_path / "plain", {"pooling_mode_mean_tokens": True})
    torch.testing.assert_close(runtime.load(path).embed("A Cat"), runtime.load(plain).embed("q: a cat"))


def test_pooling_that_is_not_supported_is_refused_by_name(checkpoint, tmp_path):
    path = _with_pooling(checkpoint, tmp_path / "a", {"pooling_mode_weightedmean_tokens": True})
    with pytest.raises(RequestError, match="weightedmean"):
        runtime.load(path).embed("x")
    (path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]))
    assert "Dense" in read_pooling(path).refusal
    (path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "../1_Pooling"}]))
    with pytest.raises(ArtifactError, match="inside"):
        runtime.load(path)


@torch.no_grad()
def test_names_of_other_classes_are_understood(tmp_path):
    """A checkpoint with the prefix of a model with a head, read as the bare model; and one without a pooler."""
    source = bert()
    path = save(source, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    renamed = {f"bert.{name}": value for name, value in tensors.items() if "pooler" not in name}
    renamed["bert.embeddings.position_ids"] = torch.arange(64)[None]
    renamed["cls.seq_relationship.weight"] = torch.zeros(2, 64)
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    model = runtime.load(path)
    ids = torch.randint(0, 256, (2, 9))
    torch.testing.assert_close(model.hidden_states(ids), source(ids).last_hidden_state)
    assert model.engine.module.pooler is None


def test_wrong_requests_are_one_sentence(model, checkpoint, tmp_path):
    for call, words in (
        (lambda: model.hidden_states([[1, 2], [3]]), "equally long"),
        (lambda: model.hidden_states([[300]]), "outside the vocabulary"),
        (lambda: model.hidden_states([[1] * 65]), "context holds 64"),
        (lambda: model.hidden_states([[1, 2]], [[1]]), "shape"),
        (lambda: model.hidden_states([[1, 2]], [[0, 0]]), "a token"),
        (lambda: model.hidden_states(torch.zeros(1, 2)), "integers"),
        (lambda: model.embed([]), "empty"),
        (lambda: model.embed([""]), "text 0 is empty"),
        (lambda: model.embed([1]), "list of texts"),
        (lambda: model.embed("x", batch_size=0), "batch_size"),
        (lambda: model.embed("x", normalize=1), "normalize"),
        (lambda: runtime.load(checkpoint, max_memory="1GB"), "max_memory"),
        (lambda: runtime.load(checkpoint, kernels="int4-c"), "kernels"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
    bare = shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    with pytest.raises(RequestError, match="no tokenizer"):
        runtime.load(bare).embed("x")
