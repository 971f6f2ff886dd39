"""Tokens are removed: rows of the embeddings and the head, and the tokenizer; what is left says of its tokens what the whole model says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL
from encoder_models import bert, t5
from random_models import UNLIMITED
from runs import TIMED
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import compress
import runtime
from compress.prune.structure.vocabulary.removal import TokenRemoval
from compress.recipe import load as load_recipe
from compress.run.plan import make_plan
from compress.run.session import Session
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError
from runtime.modeling.skeleton import read_config

PADDED = 512
SPECIAL = ["<s>", "</s>", "<pad>"]


def tokenizer(frame: str = "$A") -> Any:
    """Byte-pairs of the test's text and of other text, 256 + about 190 tokens and three special ones behind them."""
    other = [
        "Completely different sentences about mountains, rivers and whales, which swim through many oceans.\n"
    ] * 20
    lines = [f"line {i}: the square of {i} is {i * i}, and its double is {2 * i}.\n" for i in range(400)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        other + lines, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(SPECIAL)
    ids = [(token, backend.token_to_id(token)) for token in SPECIAL]
    backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        cls_token="<s>",
        sep_token="</s>",
    )


def stage(**fields: Any) -> dict[str, Any]:
    return {"structure": {"method": "frequency", "multiple": 1, **fields}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint(family)`: a random one in float32 with a vocabulary of 512, more than the tokenizer's."""

    def make(family: str, vocab_size: int = PADDED, **changes: Any) -> Path:
        frame = {"bert": "<s> $A </s>", "t5": "$A </s>"}.get(family, "$A")
        own = tokenizer(frame)
        ids = {"bos_token_id": own.bos_token_id, "eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id}
        torch.manual_seed(3)
        model: Any
        if family == "bert":
            model = bert(changes.pop("name", "BertModel"), vocab_size=vocab_size, **{**ids, **changes})
        elif family == "t5":
            model = t5(vocab_size=vocab_size, decoder_start_token_id=own.pad_token_id, **{**ids, **changes})
        else:
            settings = SMALL["qwen2"] if family in ("phi", "phi3") else SMALL[family]
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(family, vocab_size=vocab_size, **{**settings, **ids, **changes})
            )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1.0)
        path = tmp_path / family
        model.save_pretrained(path)
        own.save_pretrained(path)
        return path

    return make


@pytest.fixture
def recipe(recipe: Any) -> Callable[..., dict[str, Any]]:
    """All of the text is calibration text."""

    def make(model: Path, *stages: dict[str, Any], **sections: Any) -> dict[str, Any]:
        made: dict[str, Any] = recipe(model, *stages, **sections)
        made["calibration"]["samples"] = 1000
        return made

    return make


def least(recipe: dict[str, Any], tmp_path: Path) -> int:
    """What the refusal of a cut that is too deep says."""
    with pytest.raises(RequestError, match=r"keep \d+ or more") as error:
        make_plan(load_recipe({**recipe, "stages": [stage(keep=300)]}), tmp_path / "no")
    return int(str(error.value).rpartition("keep ")[2].split()[0])


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": False}), ("llama", {"tie_word_embeddings": True}), ("phi", {}),
        ("gemma2", {}), ("t5", {"tie_word_embeddings": False}), ("t5", {"tie_word_embeddings": True}),
    ],
)  # fmt: skip
def test_the_tokens_that_stay_have_the_logits_that_they_had(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    source = checkpoint(family, **changes)
    request = recipe(source, stage(keep=400))
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    (facts,) = made.manifest["passes"]
    assert (facts["before"], facts["after"], facts["unit"], facts["padding"]) == (PADDED, 400, "tokens", 0)
    assert facts["parameters_after"] < facts["parameters_before"]
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(made.path)
    assert len(after) == 400
    kept = torch.tensor(before.convert_tokens_to_ids([after.convert_ids_to_tokens(n) for n in range(400)]))
    config = read_config(made.path)
    text = config.get_text_config()
    assert text.vocab_size == 400
    assert config.tie_word_embeddings == read_config(source).tie_word_embeddings
    assert (config.eos_token_id, config.pad_token_id) == (after.eos_token_id, after.pad_token_id)
    assert kept[after.eos_token_id] == before.eos_token_id
    # The text of the recipe is read as before.
    lines = (Path(request["calibration"]["data"])).read_text().splitlines()[:50]
    for line in lines:
        assert kept[after(line)["input_ids"]].tolist() == before(line)["input_ids"]
    for line in ["whales swim 12 times", "ünknown 山"]:
        assert after.decode(after(line)["input_ids"], skip_special_tokens=True) == line
    # Its logits are those of the whole model, bit by bit in the same arithmetic.
    found, expected = {}, {}
    for part, path in ((found, made.path), (expected, source)):
        for file in Path(path).glob("*.safetensors"):
            part |= load_file(file)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name] if value.shape == expected[name].shape else expected[name][kept])
    ids = torch.tensor([after("".join(lines))["input_ids"][:40]])
    torch.testing.assert_close(logits(made.path, ids), logits(source, kept[ids])[..., kept], rtol=1e-5, atol=1e-5)
    model = runtime.load(made.path)
    prompt = after("line 7: the square")["input_ids"]
    assert model.generate(prompt, max_new_tokens=4)


def logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForSeq2SeqLM

    kind: Any = AutoModelForSeq2SeqLM if read_config(path).is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    more = {"decoder_input_ids": ids[:, :8]} if kind is AutoModelForSeq2SeqLM else {}
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM"])
def test_an_encoder(checkpoint: Callable[..., Path], recipe: Any, text: Path, tmp_path: Path, name: str) -> None:
    source = checkpoint("bert", name=name)
    request = recipe(
        source, stage(keep=400), evaluate={"data": str(text), "sequence_length": 32, "samples": 8, "min_cosine": 0.9999}
    )
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert made.metrics["cosine"]["min"] == pytest.approx(1, abs=1e-6)
    before, after = runtime.load(source), runtime.load(made.path)
    words = ["line 3: the square of 3 is 9", "its double is 6."]
    torch.testing.assert_close(after.embed(words), before.embed(words), rtol=1e-5, atol=1e-5)
    if name == "BertForMaskedLM":
        held = load_file(next(made.path.glob("*-00003-of-*.safetensors")))
        assert held["cls.predictions.bias"].shape == (400,)


def test_padding_goes_first_and_what_a_config_names_stays(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path
) -> None:
    source = checkpoint("llama", pad_token_id=500)
    whole = len(AutoTokenizer.from_pretrained(source))
    made = compress.apply(recipe(source, stage(keep=whole + 10)), output=tmp_path / "out", quiet=True)
    assert made.manifest["passes"][0]["padding"] == 10
    config = json.loads((made.path / "config.json").read_text())
    assert config["vocab_size"] == whole + 10
    assert whole <= config["pad_token_id"] < whole + 10
    old, new = (load_file(next(iter(sorted(p.glob("*.safetensors"))[-1:]))) for p in (source, made.path))
    rows = [value["model.embed_tokens.weight"] for value in (old, new)]
    assert torch.equal(rows[1][config["pad_token_id"]], rows[0][500])
    assert torch.equal(rows[1][:whole], rows[0][:whole])


def test_generation_and_special_tokens_keep_their_meaning(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    before = AutoTokenizer.from_pretrained(source)
    words = before("whales rivers")["input_ids"]
    file = source / "generation_config.json"
    settings = json.loads(file.read_text()) | {
        "eos_token_id": [before.eos_token_id, words[0]],
        "suppress_tokens": [words[1]],
    }
    file.write_text(json.dumps(settings))
    made = compress.apply(recipe(source, stage(keep=400)), output=tmp_path / "out", quiet=True)
    after = AutoTokenizer.from_pretrained(made.path)
    found = json.loads((made.path / "generation_config.json").read_text())
    assert after.convert_ids_to_tokens(found["eos_token_id"]) == ["</s>", before.convert_ids_to_tokens(words[0])]
    assert after.convert_ids_to_tokens(found["suppress_tokens"]) == before.convert_ids_to_tokens([words[1]])
    assert runtime.load(made.path).eos_token_ids == frozenset(found["eos_token_id"])


def test_what_is_too_few(checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path) -> None:
    source = checkpoint("llama")
    request = recipe(source)
    smallest = least(request, tmp_path)
    made = compress.apply({**request, "stages": [stage(keep=smallest)]}, output=tmp_path / "out", quiet=True)
    assert made.manifest["passes"][0]["after"] == smallest
    cases = [
        ({"keep": smallest - 1}, ["structure.keep", "occur in the calibration text", f"keep {smallest} or more"]),
        ({"keep": 2}, ["structure.keep", "2 tokens cannot hold the 3 special ones", str(smallest)]),
        ({"ratio": "60%"}, ["structure.ratio", f"keep {smallest} or more"]),
        ({"budget": {"parameters": "50%"}}, ["structure.budget", "still takes"]),
        ({"keep": PADDED}, ["structure.keep", "1 to 511"]),
    ]
    for fields, words in cases:
        with pytest.raises(RequestError) as error:
            compress.apply({**request, "stages": [stage(**fields)]}, output=tmp_path / "no", quiet=True)
        for word in words:
            assert word in str(error.value), str(error.value)
        assert not (tmp_path / "no").exists()


def test_a_budget_of_parameters(checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path) -> None:
    made = compress.apply(
        recipe(checkpoint("llama", tie_word_embeddings=False), stage(budget={"parameters": "92%"})),
        output=tmp_path / "out",
        quiet=True,
    )
    (facts,) = made.manifest["passes"]
    assert 0.91 < facts["parameters_after"] / facts["parameters_before"] <= 0.92


def test_a_tokenizer_that_does_not_belong_or_is_not_there(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path
) -> None:
    source = checkpoint("llama", vocab_size=440, pad_token_id=0)
    with pytest.raises(
        RequestError,
        match=r"structure\.remove: .*tokenizer\.json .*45\d.* 440",
    ):
        compress.apply(recipe(source, stage(keep=430)), output=tmp_path / "out", quiet=True)
    source = checkpoint("qwen3")
    content = json.loads((source / "tokenizer.json").read_text())
    content["model"] = {"type": "WordLevel", "vocab": {"line": 0, "<unk>": 1}, "unk_token": "<unk>"}
    (source / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(RequestError, match=r"structure\.remove: .* of kind WordLevel"):
        compress.apply(recipe(source, stage(keep=430)), output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_quality_is_that_of_the_text(checkpoint: Callable[..., Path], recipe: Any, text: Path, tmp_path: Path) -> None:
    source = checkpoint("llama")
    evaluate = {**UNLIMITED, "data": str(text), "sequence_length": 32, "samples": 8}
    plain = compress.apply(
        recipe(source, {"quantize": {"method": "rtn", "bits": 8, "group_size": 32}}, evaluate=evaluate),
        output=tmp_path / "q",
        quiet=True,
    )
    request = recipe(source, stage(keep=400), evaluate={**evaluate, "max_perplexity_increase": "5%"})
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    metrics = made.metrics
    assert metrics["before"]["perplexity"] == pytest.approx(plain.metrics["before"]["perplexity"], rel=1e-6)
    assert metrics["tokens"] == plain.metrics["tokens"] == 8 * 31
    # The text's own tokens are all there: the same windows, and a softmax over fewer of them.
    assert metrics["after"]["perplexity"] < metrics["before"]["perplexity"]
    ratio = metrics["after"]["bits_per_character"] / metrics["before"]["bits_per_character"]
    assert ratio == pytest.approx(math.log(metrics["after"]["perplexity"]) / math.log(metrics["before"]["perplexity"]))
    assert "kl" not in metrics
    assert "vocabulary was cut" in metrics["reason"]
    assert [limit["name"] for limit in metrics["limits"]] == ["max_perplexity_increase"]
    for name in ("max_kl", "min_agreement"):
        with pytest.raises(RequestError, match=rf"evaluate\.{name}: "):
            compress.apply({**request, "evaluate": {**evaluate, name: 0.5}}, output=tmp_path / "no", quiet=True)


def test_the_same_text_whatever_its_tokens(
    checkpoint: Callable[..., Path], recipe: Any, text: Path, tmp_path: Path
) -> None:
    """Where tokens of the evaluation text are gone it is longer, and both models are still asked about the same characters."""
    file = tmp_path / "other.txt"
    file.write_text("Whales, mountains and rivers: many different oceans, through which whales swim.\n" * 60)
    request = recipe(checkpoint("llama"), stage(keep=least(recipe(checkpoint("llama")), tmp_path)))
    request["evaluate"] = {**UNLIMITED, "data": str(file), "sequence_length": 32, "samples": 20}
    session = Session.open(load_recipe(request))  # holds the checkpoints that its context reads
    context = session.context
    theirs, ours = context.same_text()
    assert len(theirs.ids) == 20
    assert len(ours.ids) > 20
    assert abs(int(ours.characters.sum()) - int(theirs.characters.sum())) < 32 * 8
    whole = "".join([file.read_text()])
    read = context.source_tokenizer.decode(theirs.ids.flatten())
    assert whole.startswith(read)
    assert int(theirs.characters.sum()) == len(read)
    assert whole.startswith(context.tokenizer.decode(ours.ids.flatten()))
    assert context.evaluation is not None
    assert (context.evaluation.kind, context.evaluation.rows) == ("named", len(ours.ids))


def test_both_tokenizers_read_the_same_held_out_part(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path
) -> None:
    request = recipe(checkpoint("llama"), stage(keep=least(recipe(checkpoint("llama")), tmp_path)))
    request["evaluate"] = {"sequence_length": 32, "samples": 4}
    session = Session.open(load_recipe(request))  # holds the checkpoints that its context reads
    context = session.context
    theirs, ours = context.same_text()
    read, again = (
        t.decode(s.ids.flatten()) for t, s in ((context.source_tokenizer, theirs), (context.tokenizer, ours))
    )
    assert read.startswith(again) or again.startswith(read)
    assert context.evaluation is not None
    assert context.evaluation.kind == "held out"
    calibrated = "".join(context.tokenizer.decode(ids.flatten()) for ids, _ in context.calibration.batches)
    assert len(calibrated) > 2 * len(read)


@pytest.mark.slow
def test_stages_that_follow_read_with_the_new_tokenizer(
    checkpoint: Callable[..., Path], recipe: Any, text: Path, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    stages = (
        stage(keep=430), stage(keep=400), {"structure": {"method": "obs", "keep": 64, "multiple": 1}},
        {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}},
    )  # fmt: skip
    request = recipe(source, *stages, evaluate={**UNLIMITED, "data": str(text), "sequence_length": 32, "samples": 8})
    plan = make_plan(load_recipe(request), tmp_path / "out")
    assert "vocabulary 512 -> 430 tokens by frequency; vocabulary 430 -> 400 tokens" in plan.headline()
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert abs(plan.bytes_after - made.manifest["bytes"]["after"]) < 0.02 * plan.bytes_after
    config = json.loads((made.path / "config.json").read_text())
    assert (config["vocab_size"], config["intermediate_size"]) == (400, 64)
    assert made.manifest["tensors"]["model.embed_tokens.weight"]["cut"] == [PADDED, 64]
    assert Checkpoint(made.path).shape("model.embed_tokens.weight") == (400, 64)


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("teacher", ["memory", "cached"])
@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
def test_recovery_after_it_learns_from_the_whole_model(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path, family: str, teacher: str
) -> None:
    """Where nothing but tokens went, the teacher has nothing to teach: it says of the tokens that stay what the model says."""
    source = checkpoint(family)
    small = {"samples": 16, "sequence_length": 24, "steps": 16, "batch_size": 4, "evaluate_every": 8}
    options = {"teacher": teacher, "teacher_top": 512, "learning_rate": 3e-4}
    recover = {"recover": {"method": "finetune", **options, **small}}
    cuts = (stage(keep=430), stage(keep=400))
    with pytest.raises(RequestError, match=r"recover\.method: "):
        compress.apply(recipe(source, *cuts, recover), output=tmp_path / "no", quiet=True)
    # Whatever comes before, it is the teacher's ids that the teacher reads: a stage that removes no weight lets that be seen.
    nothing = {"prune": {"method": "magnitude", "sparsity": 0.0}}
    request = recipe(source, *cuts, nothing, recover)
    (*_, facts) = compress.apply(request, output=tmp_path / "a", quiet=True).manifest["passes"]
    assert facts["before"]["squarehead"] < 1e-5
    assert family == "bert" or facts["before"]["kl"] < 1e-4
    ffn = {"structure": {"method": "magnitude", "keep": 64, "multiple": 1, "reconstruct": False}}
    request = recipe(source, *cuts, ffn, recover)
    (*_, facts) = compress.apply(request, output=tmp_path / "b", quiet=True).manifest["passes"]
    assert facts["after"]["loss"] < 0.95 * facts["before"]["loss"]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_was_stopped_goes_on_with_the_same_bytes(
    checkpoint: Callable[..., Path], recipe: Any, interrupted: Callable[..., Path], tmp_path: Path, stop: int
) -> None:
    source = checkpoint("llama")
    request = recipe(source, stage(keep=400))
    straight = compress.apply(request, output=tmp_path / "straight", quiet=True)
    made = compress.apply(request, output=interrupted(request, stop), resume=True, quiet=True)
    for file in straight.path.iterdir():
        if file.suffix in (".safetensors", ".json") and file.name not in TIMED:
            assert file.read_bytes() == (made.path / file.name).read_bytes(), file.name


def test_a_head_that_says_something_else_is_noticed(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TokenRemoval.outside

    def wrong(removal: TokenRemoval) -> Any:
        tensors, lines = real(removal)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
        return tensors, lines

    monkeypatch.setattr(TokenRemoval, "outside", wrong)
    request = recipe(checkpoint("llama", tie_word_embeddings=False), stage(keep=400))
    with pytest.raises(CompressError, match="logits"):
        compress.apply(request, output=tmp_path / "out", quiet=True)
