"""Encoder-decoders: greedy outputs and logits against transformers, batches, options, bad input."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from encoder_models import byte_tokenizer, save, t5
from transformers import BartConfig, BartForConditionalGeneration, T5ForConditionalGeneration

import runtime
from runtime.api.seq2seq import Seq2SeqModel
from runtime.errors import ArtifactError, RequestError

SOURCES = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [3], [200, 201]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(t5(), tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def reference(checkpoint):
    return T5ForConditionalGeneration.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def model(checkpoint):
    return runtime.load(checkpoint)


def test_greedy_outputs_are_those_of_transformers(model, reference):
    assert isinstance(model, Seq2SeqModel)
    outputs = model.generate(SOURCES, max_new_tokens=12, ignore_eos=True)
    assert len({tuple(output) for output in outputs}) > 1, "the outputs differ"
    for source, output in zip(SOURCES, outputs, strict=True):
        theirs = reference.generate(
            torch.tensor([source]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=[]
        )
        assert output == theirs[0, 1:].tolist()
        assert model.generate(source, max_new_tokens=12, ignore_eos=True) == output, "alone as in a batch"


def test_an_output_ends_at_the_end_token_and_its_row_leaves_the_batch(model):
    free = model.generate(SOURCES, max_new_tokens=8, ignore_eos=True)
    end = free[1][2]
    model_ids, model.eos_token_ids = model.eos_token_ids, frozenset([end])
    try:
        outputs = model.generate(SOURCES, max_new_tokens=8)
    finally:
        model.eos_token_ids = model_ids
    for whole, output in zip(free, outputs, strict=True):
        assert output == (whole[: whole.index(end) + 1] if end in whole else whole)
    assert "eos" in model.stats["finish_reasons"] or "length" in model.stats["finish_reasons"]


@torch.no_grad()
def test_logits_are_those_of_transformers(model, reference):
    ids, target = torch.randint(0, 256, (3, 9)), torch.randint(0, 256, (3, 5))
    logits = model.logits(ids, target)
    expected = reference(input_ids=ids, decoder_input_ids=target).logits
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    alone = model.logits(ids[:1, :4], target[:1])
    torch.testing.assert_close(model.logits(ids, target, mask)[:1], alone, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(logits[:1], alone, atol=1e-2), "the mask matters"


def test_texts_go_in_and_come_out(model):
    tokenizer = byte_tokenizer(special=False)
    texts = ["a small cat", "moon"]
    answers = model.generate(texts, max_new_tokens=6, ignore_eos=True)
    for text, answer in zip(texts, answers, strict=True):
        ids = model.generate(tokenizer(text)["input_ids"], max_new_tokens=6, ignore_eos=True)
        assert answer == tokenizer.decode(ids, skip_special_tokens=True)
    assert model.generate("moon", max_new_tokens=6, ignore_eos=True) == answers[1]
    assert model.stats["new_tokens"] == 6
    assert model.stats["cache_bytes"] > 0
    assert set(model.explain()) >= {
        "encoder.block.0.layer.0.SelfAttention.q",
        "decoder.block.1.layer.1.EncDecAttention.v",
    }


def test_sampling_repeats_with_its_seed(model):
    options = {"max_new_tokens": 8, "temperature": 2.0, "ignore_eos": True}
    first = model.generate(SOURCES, seed=[1, 2, 3, 4], **options)
    assert model.generate(SOURCES[1], seed=2, **options) == first[1]
    assert model.generate(SOURCES, seed=[5, 6, 7, 8], **options) != first


def test_learned_positions_and_a_forced_first_token(tmp_path):
    torch.manual_seed(0)
    config = BartConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_ffn_dim=96, vocab_size=260, max_position_embeddings=16, init_std=0.3, pad_token_id=256,
        bos_token_id=257, eos_token_id=258, decoder_start_token_id=258,
    )  # fmt: skip
    source = BartForConditionalGeneration(config).eval()
    source.generation_config.forced_bos_token_id, source.generation_config.forced_eos_token_id = 7, None
    model = runtime.load(save(source, tmp_path / "bart"))
    expected = source.generate(torch.tensor([SOURCES[1]]), max_new_tokens=8, do_sample=False, num_beams=1)[
        0, 1:
    ].tolist()
    assert expected[0] == 7
    assert model.generate(SOURCES[1], max_new_tokens=8) == expected
    with pytest.raises(RequestError, match="context"):
        model.generate([1] * 17)
    with pytest.raises(RequestError, match="context"):
        model.generate([1], max_new_tokens=16)


def test_wrong_requests_are_one_sentence(model, checkpoint, tmp_path):
    for call, words in (
        (lambda: model.generate([]), "empty"),
        (lambda: model.generate([1], max_tokens=3), "max_new_tokens"),
        (lambda: model.generate([1], max_new_tokens=0), "max_new_tokens"),
        (lambda: model.generate([1], cache_memory="1GB"), "cache_memory"),
        (lambda: model.generate([999]), "outside the vocabulary"),
        (lambda: model.generate(SOURCES, seed=[1]), "seed"),
        (lambda: model.logits([[1]], [[1], [2]]), "as many"),
        (lambda: model.logits([[1]], [[1.5]]), "decoder_input_ids"),
        (lambda: runtime.load(checkpoint, max_memory="1GB"), "max_memory"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
    path = shutil.copytree(checkpoint, tmp_path / "lost", ignore=shutil.ignore_patterns("generation_config.json"))
    config = json.loads((path / "config.json").read_text())
    config.pop("decoder_start_token_id")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="decoder_start_token_id"):
        runtime.load(path)
