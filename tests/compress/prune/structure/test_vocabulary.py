"""Tokenizers of all kinds with fewer tokens: every text can still be written, and one whose tokens all stay is read as before."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from compress.prune.structure.vocabulary import Tokens, choose, closed, read_vocabulary
from compress.prune.structure.vocabulary.config_ids import named, renumbered
from compress.prune.structure.vocabulary.vocabulary import BPE
from runtime.errors import RequestError

TEXTS = [
    f"line {i}: the square of {i} is {i * i}, and its double is {2 * i}; naïve words, ünder the {chr(0x4E00 + i)} tree\n"
    for i in range(300)
]
OTHER = [
    "The quick brown fox, 12345!",
    "ünderstood naïvely…",
    "日本語 and 🙂 emoji",
    "    indented\n\ttabs",
    "x" * 30,
    "",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]


def byte_level() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])  # behind the model's own
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def byte_fallback() -> Any:
    """As Llama's: pieces of words with a mark for spaces, and what has none in bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = [*SPECIAL, *(f"<0x{value:02X}>" for value in range(256)), *(t for t in model["vocab"] if t not in SPECIAL)]
    vocabulary = {token: number for number, token in enumerate(names)}
    backend = Tokenizer(
        models.BPE(
            vocabulary, [tuple(m) for m in model["merges"]], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def word_piece() -> Any:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def unigram() -> Any:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.Sequence(
        [processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])]
    )
    backend.enable_padding(pad_id=3, pad_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "word_piece": word_piece, "unigram": unigram}


def cut(path: Path, tokenizer: Any, share: float, size: int | None = None) -> Tokens:
    """The least frequent tokens of a few texts go: those between what must stay and all, up to a share. Files are rewritten."""
    whole = len(tokenizer)
    config = LlamaConfig(vocab_size=size or whole, bos_token_id=None, eos_token_id=None)
    vocabulary = read_vocabulary(path, config, size or whole)
    counts = Counter(n for text in TEXTS[:40] for n in tokenizer(text)["input_ids"])
    required = closed(vocabulary.required | counts.keys(), vocabulary.parts)
    ranked = sorted(vocabulary.ids, key=lambda n: (-counts[n], n))
    keep = len(required) + round((whole - len(required)) * (1 - share))
    kept = choose(ranked, keep, required, vocabulary.parts)
    assert len(kept) == keep
    assert kept >= vocabulary.required | counts.keys()
    tokens = Tokens(vocabulary, vocabulary.new_ids(kept))
    tokens.write(path)
    return tokens


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_read_as_before_or_in_smaller_pieces(tmp_path: Path, kind: str, share: float) -> None:
    before = KINDS[kind]()
    before.save_pretrained(tmp_path)
    tokens = cut(tmp_path, before, share)
    after = AutoTokenizer.from_pretrained(tmp_path)
    old = tokens.kept.tolist()
    assert len(after) == len(old) < len(before) or share < 1
    assert sorted(after.get_vocab().values()) == list(range(len(old)))
    for token, number in after.get_vocab().items():
        assert before.convert_tokens_to_ids(token) == old[number]
    same = 0
    for text in [*TEXTS, *OTHER]:
        one, other = before(text)["input_ids"], after(text)["input_ids"]
        if set(one) <= set(old):
            assert [old[number] for number in other] == one
            same += 1
        assert after.decode(other) == before.decode(one)
        assert after.decode(other, skip_special_tokens=True) == before.decode(one, skip_special_tokens=True)
        if kind == "byte_level" or (kind == "byte_fallback" and not text.startswith(" ")):
            assert after.decode(other, skip_special_tokens=True) == text
    assert same >= 40
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token"):
        if getattr(before, name) is not None:
            assert old[getattr(after, f"{name}_id")] == getattr(before, f"{name}_id")


def test_of_merges_that_give_the_same_token_the_one_that_happens_counts(tmp_path: Path) -> None:
    """As in tokenizers that come from sentencepiece: every way to split a token is a merge."""
    choice = random.Random(0)
    for _ in range(20):
        words = ["".join(w) for n in (2, 3, 4) for w in itertools.product("abc", repeat=n)]
        names = ["a", "b", "c", *choice.sample(words, 40)]
        vocabulary = {token: number for number, token in enumerate(names)}
        merges = [
            (w[:n], w[n:]) for w in names for n in range(1, len(w)) if w[:n] in vocabulary and w[n:] in vocabulary
        ]
        choice.shuffle(merges)
        model = models.BPE(vocabulary, merges)
        backend = Tokenizer(model)
        pieces = BPE(json.loads(backend.to_str())["model"])
        texts = ["".join(choice.choices("abc", k=choice.randint(1, 12))) for _ in range(300)]
        for text in texts[:60]:
            ids = backend.encode(text).ids
            kept = closed([*ids, 0, 1, 2], pieces.parts)
            new = {number: place for place, number in enumerate(sorted(kept))}
            smaller = pieces.without(new)
            other = Tokenizer(models.BPE(smaller["vocab"], [tuple(merge) for merge in smaller["merges"]]))
            for again in texts:
                if set(backend.encode(again).ids) <= kept:
                    assert [sorted(kept)[n] for n in other.encode(again).ids] == backend.encode(again).ids
                assert "".join(other.encode(again).tokens) == again


def test_words_with_marks_at_their_ends() -> None:
    backend = Tokenizer(models.BPE(continuing_subword_prefix="##", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=900, continuing_subword_prefix="##", end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    content = json.loads(backend.to_str())
    pieces = BPE(content["model"])
    ids = {number for text in TEXTS[:20] for number in backend.encode(text).ids}
    kept = closed(ids | pieces.base(), pieces.parts)
    assert len(kept) < len(pieces.vocabulary)
    new = {number: place for place, number in enumerate(sorted(kept))}
    other = Tokenizer.from_str(json.dumps({**content, "model": pieces.without(new)}))
    for text in TEXTS:
        one = backend.encode(text)
        if set(one.ids) <= kept:
            assert [new[number] for number in one.ids] == other.encode(text).ids
        else:
            plain = [
                "".join(t.removeprefix("##").removesuffix("</w>") for t in e.tokens) for e in (one, other.encode(text))
            ]
            assert plain[0] == plain[1]


def test_files_of_older_versions_are_rewritten_too(tmp_path: Path) -> None:
    before = byte_level()
    before.save_pretrained(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    last = len(before) - 1
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in model["merges"]))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": last}))
    (tmp_path / "spiece.model").write_bytes(b"pieces")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"added_tokens_decoder": {str(last): {"content": "<pad>", "special": True}}, "pad_token_id": last}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [last - 1, 7], "suppress_tokens": [3], "top_k": 5})
    )
    tokens = cut(tmp_path, before, 0.5)
    new = {
        name: json.loads((tmp_path / name).read_text())
        for name in ("vocab.json", "added_tokens.json", "generation_config.json")
    }
    assert new["vocab.json"] == json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert new["added_tokens.json"] == {"<pad>": tokens.new[last]} == {"<pad>": len(tokens.kept) - 1}
    assert new["generation_config.json"] == {
        "eos_token_id": [tokens.new[last - 1], tokens.new[7]], "suppress_tokens": [tokens.new[3]], "top_k": 5,
    }  # fmt: skip
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert list(settings["added_tokens_decoder"]) == [str(tokens.new[last])]
    assert settings["pad_token_id"] == tokens.new[last]
    lines = (tmp_path / "merges.txt").read_text().splitlines()
    assert lines[0] == "#version: 0.2"
    assert len(lines) - 1 == len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"])
    assert not (tmp_path / "spiece.model").exists()


def test_rows_without_a_token_come_last_and_those_that_a_config_names_stay(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    size = len(tokenizer) + 20
    config = LlamaConfig(vocab_size=size, pad_token_id=size - 3, bos_token_id=None, eos_token_id=None)
    vocabulary = read_vocabulary(tmp_path, config, size)
    assert size - 3 in vocabulary.required
    new = vocabulary.new_ids(vocabulary.required)
    assert new[size - 3] == len(new) - 1


def test_ids_that_configs_name() -> None:
    values = {
        "eos_token_id": [2, 5], "pad_token_id": None, "vocab_size": 9, "forced_decoder_ids": [[1, 4]], "sequence_bias": [[[3], 2]],
        "text_config": {"bos_token_id": 1, "decoder_start_token_id": 0, "image_token_index": 100}, "id2label": {0: "a"},
        "begin_suppress_tokens": [7], "bad_words_ids": [[6]], "num_beams": 4,
    }  # fmt: skip
    assert named(values, 9) == {0, 1, 2, 3, 4, 5, 6, 7}
    changed = renumbered(values, lambda n: n + 10)
    assert changed["forced_decoder_ids"] == [[1, 14]]
    assert changed["sequence_bias"] == [[[13], 2]]
    assert changed["text_config"] == {"bos_token_id": 11, "decoder_start_token_id": 10, "image_token_index": 110}
    assert {key: changed[key] for key in ("vocab_size", "num_beams", "id2label", "pad_token_id")} == {
        "vocab_size": 9, "num_beams": 4, "id2label": {0: "a"}, "pad_token_id": None,
    }  # fmt: skip


def test_what_cannot_be_cut_says_so(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=100)
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path, config, 100)
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="WordLevel"):
        read_vocabulary(tmp_path, config, 100)
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"id \d+,.* 100"):
        read_vocabulary(tmp_path, config, 100)
