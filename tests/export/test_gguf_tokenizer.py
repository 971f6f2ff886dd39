"""Tokenizers in GGUF: what is found in tokenizer.json, what is refused, and the same token ids in llama.cpp."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import export
from export.gguf import pretokenizers, tokenizer
from export.gguf.pretokenizers import DIGIT, GPT2, KNOWN, Known
from export.source import Source
from runtime.errors import RequestError

gguf = pytest.importorskip("gguf")
LLAMA_CPP = importlib.util.find_spec("llama_cpp") is not None
needs_llama_cpp = pytest.mark.skipif(not LLAMA_CPP, reason="llama-cpp-python is not installed")
CORPUS = [
    pretokenizers.EVERYTHING,
    "it's we're I'll HE'LL 2024 12345 snake_case HTTPServer\n\n    return x  # done\n",
] * 4
MakeModel = Callable[[Any], Path]


@pytest.fixture
def model(tiny_llama: Callable[..., Path], tmp_path: Path) -> MakeModel:
    """`model(tokenizer)`: a tiny Llama with this tokenizer (None: with none)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(made: Any, vocab_size: int | None = None) -> Path:
        path = tmp_path / "model"
        size = vocab_size or (257 if made is None else len(made))
        config = LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            vocab_size=size, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
        if made is not None:
            made.save_pretrained(path)
        return path

    return make


def _known(name: str) -> Known:
    return next(known for known in KNOWN if known.name == name)


def _byte_level(known: Known, normalizer: Any = None, **special: Any) -> Any:
    """A trained byte-level BPE behind these steps."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(ignore_merges=known.ignore_merges))
    steps: list[Any] = []
    for step in known.steps:
        if step == DIGIT:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif step != GPT2:
            steps.append(pre_tokenizers.Split(Regex(step), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=GPT2 in known.steps))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if normalizer:
        backend.normalizer = getattr(normalizers, normalizer)()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **special)


def _sentencepiece(pieces: int = 300) -> Any:
    """A vocabulary as SentencePiece makes it, with the merges that transformers derives from one: for each piece, in the order of
    scores, all ways to split it into two pieces."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=pieces, show_progress=False, limit_alphabet=60, max_token_length=8)
    )
    own = json.loads(trained.to_str())["model"]
    ranked = [a + b for a, b in own["merges"]]
    letters = [t for t in own["vocab"] if t not in set(ranked)]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    for piece in dict.fromkeys([*ranked, *letters]):
        vocab.setdefault(piece, len(vocab))
    merges = [
        (piece[:i], piece[i:])
        for piece in dict.fromkeys(ranked)
        for i in range(1, len(piece))
        if piece[:i] in vocab and piece[i:] in vocab
    ]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_known_pretokenizers_are_found_by_name(model: MakeModel, tmp_path: Path, known: Known) -> None:
    path = model(_byte_level(known))
    vocabulary = tokenizer.read(Source(path))
    assert vocabulary is not None
    assert [vocabulary.keys[f"tokenizer_{key}"] for key in ("model", "pre")] == ["gpt2", known.name]
    assert [known.name in remark for remark in vocabulary.remarks] == [True] * known.ascii
    text = pretokenizers.EVERYTHING
    text = "".join(line for line in text.splitlines(keepends=True) if line.isascii()) if known.ascii else text
    assert len(text) > 300
    if LLAMA_CPP:
        from export.gguf.check import LlamaModel as Model

        result = export.export(path, "gguf", tmp_path / "out", quiet=True, verify=False)
        expected = tokenizer.load(Source(path)).encode(text)
        with Model(result.path / "model.gguf", 16) as loaded:
            assert loaded.tokenize(text) == expected


def test_a_pretokenizer_without_a_name_is_found_by_its_ids() -> None:
    """The same cuts written in another way."""
    regex = _known("smaug-bpe").steps[0]
    other = Known("?", (regex.replace(r"\p{N}{1,3}|", r"(?:\p{N}){1,3}|"),))
    assert other.steps[0] != regex
    name, how = pretokenizers.identify(json.loads(_byte_level(other).backend_tokenizer.to_str()))
    assert name == "smaug-bpe"
    assert how is not None
    assert "same ids" in how


def test_an_unknown_pretokenizer_gets_the_default_and_a_warning(model: MakeModel, tmp_path: Path) -> None:
    path = model(_byte_level(Known("?", (r"\p{L}\p{L}|.|\s",))))
    vocabulary = tokenizer.read(Source(path))
    assert vocabulary is not None
    assert vocabulary.keys["tokenizer_pre"] == "default"
    said = export.export(path, "gguf", tmp_path / "out", quiet=True, verify=False).conversions
    assert any("llama.cpp's default is written" in c.what for c in said)


def test_what_llama_cpp_leaves_out_is_said(model: MakeModel) -> None:
    vocabulary = tokenizer.read(Source(model(_byte_level(KNOWN[0], normalizer="NFC"))))
    assert vocabulary is not None
    assert any("normalizer NFC" in remark for remark in vocabulary.remarks)
    assert vocabulary.composed


def test_vocabulary_has_a_token_for_every_row(model: MakeModel, tmp_path: Path) -> None:
    made = _byte_level(KNOWN[0])
    made.add_tokens(["<tool>"])
    made.add_special_tokens({"pad_token": "<pad>"})
    size = len(made)
    result = export.export(model(made, size + 5), "gguf", tmp_path / "out", quiet=True, verify=False)
    fields = gguf.GGUFReader(result.path / "model.gguf").fields
    tokens, types = (fields[f"tokenizer.ggml.{n}"].contents() for n in ("tokens", "token_type"))
    assert len(tokens) == len(types) == size + 5
    assert tokens[-1] == f"[PAD{size + 4}]"
    assert types[-5:] == [tokenizer.UNUSED] * 5
    assert types[made.convert_tokens_to_ids("<tool>")] == tokenizer.USER_DEFINED
    assert types[made.convert_tokens_to_ids("<pad>")] == tokenizer.CONTROL
    assert fields["tokenizer.ggml.padding_token_id"].contents() == made.pad_token_id
    assert fields["tokenizer.ggml.eos_token_id"].contents() == made.eos_token_id
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False


def test_tokens_that_end_a_text_and_what_is_put_around_it(model: MakeModel, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    made = _byte_level(KNOWN[0])
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
    )
    made.chat_template = "{{ messages[0].content }}"
    path = model(made)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [made.eos_token_id, 10, 11]}))
    result = export.export(path, "gguf", tmp_path / "out", quiet=True, verify=False)
    fields = gguf.GGUFReader(result.path / "model.gguf").fields
    found = {
        n: fields[f"tokenizer.ggml.{n}"].contents()
        for n in ("eos_token_id", "eot_token_id", "eom_token_id", "add_bos_token")
    }
    assert found == {"eos_token_id": made.eos_token_id, "eot_token_id": 10, "eom_token_id": 11, "add_bos_token": True}
    assert fields["tokenizer.chat_template"].contents() == "{{ messages[0].content }}"


def test_no_tokenizer_is_said(model: MakeModel, tmp_path: Path) -> None:
    path = model(None)
    result = export.export(path, "gguf", tmp_path / "out", quiet=True)
    assert any("no tokenizer is written" in c.what for c in result.conversions)
    fields = gguf.GGUFReader(result.path / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "no_vocab"
    assert fields["llama.vocab_size"].contents() == 257
    assert any("token ids" in line for line in (result.path / "README.md").read_text().splitlines())


def test_a_tokenizer_without_a_name_in_gguf_is_refused(model: MakeModel, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    path = model(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    with pytest.raises(RequestError, match=r"WordLevel.*tokenizer=none"):
        export.export(path, "gguf", tmp_path / "out", quiet=True)
    result = export.export(path, "gguf", tmp_path / "out", quiet=True, tokenizer="none")
    assert result.facts["tokenizer"] is None


def test_sentencepiece_scores_say_what_the_merges_say(model: MakeModel) -> None:
    made = _sentencepiece()
    vocabulary = tokenizer.read(Source(model(made)))
    assert vocabulary is not None
    assert (vocabulary.keys["tokenizer_model"], vocabulary.keys["add_space_prefix"]) == ("llama", True)
    assert vocabulary.remarks == []
    assert vocabulary.keys["token_types"][:4] == [
        tokenizer.UNKNOWN,
        tokenizer.CONTROL,
        tokenizer.CONTROL,
        tokenizer.BYTE,
    ]
    content = json.loads(made.backend_tokenizer.to_str())["model"]
    merges = [tuple(m) for m in content["merges"]]
    assert tokenizer.merge_scores(content["vocab"], merges)[1]
    token = next(a + b for a, b in merges if sum(x + y == a + b for x, y in merges) > 1)
    fewer = [m for m in merges if m[0] + m[1] != token] + [m for m in merges if m[0] + m[1] == token][:1]
    assert not tokenizer.merge_scores(content["vocab"], fewer)[1]
    apart = [*merges[1:], merges[0]]
    assert tokenizer.merge_scores(content["vocab"], apart)[1] == (
        sum(a + b == "".join(merges[0]) for a, b in merges) == 1
    )


@needs_llama_cpp
def test_sentencepiece_gives_the_same_ids_in_llama_cpp(model: MakeModel, tmp_path: Path) -> None:
    made = _sentencepiece()
    result = export.export(model(made), "gguf", tmp_path / "out", quiet=True)
    assert result.verification is not None
    assert result.verification.metrics["same_token_ids"] is True


def test_steps_are_read_in_every_spelling() -> None:
    regex = _known("qwen2").steps[0]
    literal = regex.replace(r"\r", "\r").replace(r"\n", "\n")
    split = {"type": "Split", "pattern": {"Regex": literal}, "behavior": "Removed", "invert": True}
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    assert pretokenizers.steps_of({"type": "Sequence", "pretokenizers": [split, last]}) == (regex,)
    other = {**split, "behavior": "MergedWithNext", "invert": False}
    assert pretokenizers.steps_of(other) != (regex,)
    assert pretokenizers.steps_of(None) == ()
