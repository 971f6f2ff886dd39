"""Dimensions of the hidden state are removed: those that hold nothing go without a trace, and of others layers make up for most."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, byte_tokenizer
from encoder_models import bert, save, t5
from random_models import UNLIMITED
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import compress
import runtime
from compress.model.config_sizes import resized
from compress.model.couplings import changed
from compress.model.source import SourceCheckpoint
from compress.prune.structure import hidden
from compress.prune.structure.hidden_norms import HiddenCut, find_norms
from compress.run import plan as footprint
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError
from runtime.modeling.skeleton import build_skeleton, read_config

BUNDLED = Path(__file__).resolve().parents[4] / "recipes" / "checkpoints" / "stdlib-4m"
KEPT = 48  # of 64
DEAD = list(range(3, 64, 4))
NO_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 256)
MIXTRAL = {**SMALL["llama"], "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}


def stage(method: str = "activation", **fields: Any) -> dict[str, Any]:
    return {"structure": {"method": method, "remove": "hidden", "multiple": 1, **fields}}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint(family)`: a random one in float32, whose norms have weights as trained ones have."""

    def make(family: str) -> Path:
        if family.startswith("t5"):
            path = save(t5(tie_word_embeddings=family == "t5-tied"), tmp_path / "t5")
        elif family in SMALL:
            path = make_checkpoint(family, torch.float32, tie_word_embeddings=family in ("gemma2", "qwen3"))
        else:
            settings = {
                "phi3": {**SMALL["qwen2"], **NO_TOKENS},
                "mixtral": MIXTRAL,
                "phi": {**SMALL["qwen2"], "head_dim": 16},
            }[family]
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=257, **settings))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim >= 2:
                        parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            path = tmp_path / family
            model.save_pretrained(path, save_original_format=False)
            byte_tokenizer().save_pretrained(path)
        held = tensors(path)
        generator = torch.Generator().manual_seed(2)
        for value in held.values():
            if value.dim() == 1:
                value += 0.2 * torch.randn(value.shape, generator=generator)
        save_file(held, path / "model.safetensors", {"format": "pt"})
        return path

    return make


def empty_dimensions(path: Path) -> None:
    """Nothing is ever written to the dimensions `DEAD`; what norms would make of it stays."""
    config = read_config(path)
    whole, smaller = (build_skeleton(c, torch.float32) for c in (config, resized(config, "hidden", KEPT)))
    slices = changed(whole, smaller, 64, KEPT)
    norms = find_norms(whole, slices)
    source = SourceCheckpoint(Checkpoint(path), whole, set(whole.state_dict()))  # experts as the model has them
    held = {}
    for name in source.names():
        value = source.get(name)
        for part in slices:
            if part.name == name and name.removesuffix(".weight") not in norms:
                value.index_fill_(part.dim, torch.tensor(DEAD), 0)
        held[name] = value
    save_file(held, path / "model.safetensors", {"format": "pt"})


def logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """What transformers makes of it."""
    from transformers import AutoModelForSeq2SeqLM

    if read_config(path).is_encoder_decoder:
        seq2seq = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            return seq2seq(input_ids=ids, decoder_input_ids=ids[:, :8]).logits
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.sampled(3, 8)
@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "mixtral", "t5", "t5-tied"])
def test_dimensions_that_hold_nothing_go_without_a_trace(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path, family: str, fitted: bool
) -> None:
    source = checkpoint(family)
    published = tensors(source).keys()
    empty_dimensions(source)
    made = compress.apply(recipe(source, stage(keep=KEPT, reconstruct=fitted)), output=tmp_path / "out", quiet=True)
    (facts,) = made.manifest["passes"]
    assert facts["dimensions"] == [d for d in range(64) if d not in DEAD]
    # A quarter of the dimensions less: everywhere the root mean square grows by the same factor.
    last = max(facts["gains"], key=lambda name: ("final" in name or name == "model.norm", "decoder" in name))
    assert all(value == pytest.approx((64 / 48) ** 0.5, rel=1e-3) for n, value in facts["gains"].items() if n != last)
    config = read_config(made.path)
    assert config.get_text_config().hidden_size == KEPT
    assert config.tie_word_embeddings == read_config(source).tie_word_embeddings
    assert tensors(made.path).keys() == published, "experts one by one, however the source has them"
    ids = torch.randint(
        0, 256, (2, 20), generator=torch.Generator().manual_seed(5)
    )  # ties in a router would make it chancy
    torch.testing.assert_close(logits(made.path, ids), logits(source, ids), rtol=1e-2, atol=1e-2)
    assert runtime.load(made.path).generate([5, 6, 7], max_new_tokens=4)
    assert bool(facts["layers"]) == fitted
    if fitted:
        assert all(line["error"] < 1e-4 for line in facts["layers"])
        names = {line["name"].rpartition(".")[2] for line in facts["layers"]}
        assert names >= ({"o", "wi", "wo", "q", "k", "v"} if family.startswith("t5") else {"o_proj"})


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize(("family", "teacher"), [("llama", "memory"), ("llama", "cached"), ("t5", "memory")])
def test_recovery_after_it_learns_from_the_dimensions_that_stay(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path, family: str, teacher: str
) -> None:
    """Where dimensions that hold nothing went, there is nothing to win back."""
    source = checkpoint(family)
    small = {"samples": 16, "sequence_length": 24, "steps": 20, "batch_size": 4, "evaluate_every": 5}
    recover = {
        "recover": {"method": "finetune", "teacher": teacher, "teacher_top": 257, "learning_rate": 1e-3, **small}
    }
    lossy = recipe(source, stage("random", keep=52, reconstruct=False), stage("random", keep=40), recover)
    (*_, facts) = compress.apply(lossy, output=tmp_path / "lossy", quiet=True).manifest["passes"]
    assert facts["after"]["loss"] < 0.9 * facts["before"]["loss"]
    empty_dimensions(source)
    made = compress.apply(
        recipe(source, stage(keep=KEPT, reconstruct=False), recover), output=tmp_path / "out", quiet=True
    )
    (_, facts) = made.manifest["passes"]
    assert facts["before"]["squarehead"] < 1e-5
    assert facts["before"]["kl"] < 1e-4


@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize("method", ["activation", "magnitude", "random"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "t5"])
def test_every_tensor_is_cut_by_the_same_dimensions(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path, family: str, method: str
) -> None:
    source = checkpoint(family)
    request = recipe(source, stage(method, keep=40, reconstruct=False))
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    (facts,) = made.manifest["passes"]
    kept = torch.tensor(facts["dimensions"])
    before, after = tensors(source), tensors(made.path)
    assert len(kept) == 40
    for name, value in after.items():
        expected = before[name]
        for dim, size in enumerate(expected.shape):
            if size != value.shape[dim]:
                assert (size, value.shape[dim]) == (64, 40)
                expected = expected.index_select(dim, kept)
        norm = facts["gains"].get(name.removesuffix(".weight"))
        if norm is not None:
            offset = float(family == "gemma2")
            torch.testing.assert_close(value, (expected + offset) * norm - offset)
        elif "embed" not in name and name != "shared.weight":  # Gemma's take a factor of the hidden size
            assert torch.equal(value, expected)
    assert facts["left_out"] == []
    if method == "magnitude":
        norms = torch.zeros(64)
        for name, value in before.items():
            for dim, size in enumerate(value.shape):
                if size != after[name].shape[dim]:
                    norms += value.movedim(dim, 0).reshape(64, -1).square().sum(1)
        assert facts["dimensions"] == norms.argsort(descending=True, stable=True)[:40].sort().values.tolist()
    assert logits(made.path, torch.randint(0, 256, (1, 12))).isfinite().all()


def test_dimensions_are_ranked_by_what_layers_read(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    request = recipe(source, stage(keep=40, reconstruct=False), calibration={
        "data": recipe(source)["calibration"]["data"], "samples": 8, "sequence_length": 40, "packing": False,
    })  # fmt: skip
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    from compress.recipe import load as load_recipe
    from compress.run.session import Session

    session = Session.open(load_recipe(request))  # holds placeholders of the cut model
    batches = session.context.calibration.batches
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    norms = [n for layer in model.model.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    total = [torch.zeros(64) for _ in norms]
    for ids, mask in batches:

        def hook(number: int, mask: torch.Tensor = mask) -> Any:
            def add(_module: Any, _args: Any, out: torch.Tensor) -> None:
                total[number] += out[mask].abs().sum(0)

            return add

        handles = [norm.register_forward_hook(hook(number)) for number, norm in enumerate(norms)]
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask.long())
        for handle in handles:
            handle.remove()
    rank = sum(value / value.mean() for value in total)
    assert isinstance(rank, torch.Tensor)
    assert made.manifest["passes"][0]["dimensions"] == rank.argsort(descending=True)[:40].sort().values.tolist()


def perplexity(tmp_path: Path, **fields: Any) -> float:
    recipe = {
        "name": "test", "model": str(BUNDLED), "calibration": {"samples": 64, "sequence_length": 128},
        "evaluate": {**UNLIMITED, "sequence_length": 128, "samples": 16}, "stages": [stage(**fields)],
    }  # fmt: skip
    made = compress.apply(recipe, output=tmp_path / "out", overwrite=True, quiet=True)
    return made.metrics["perplexity_increase"]


@pytest.mark.slow
def test_norms_that_know_of_fewer_dimensions_and_fitted_layers_win_back_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = perplexity(tmp_path, keep=224)
    cut = perplexity(tmp_path, keep=224, reconstruct=False)
    by_chance = perplexity(tmp_path, method="random", keep=224, reconstruct=False)
    monkeypatch.setattr(hidden, "gain", lambda shares, kept: 1.0)
    uncorrected = perplexity(tmp_path, keep=224, reconstruct=False)
    assert fitted < 0.4 * cut
    assert cut < 0.98 * uncorrected < 0.98 * by_chance


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_run_that_was_stopped_goes_on_with_the_same_bytes(
    checkpoint: Callable[..., Path],
    recipe: Any,
    interrupted: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: int,
) -> None:
    source = checkpoint("llama")
    request = recipe(source, stage(keep=40), {"structure": {"method": "random", "remove": "layers", "keep": 2}})
    straight = compress.apply(request, output=tmp_path / "straight", quiet=True)
    monkeypatch.setattr(footprint, "SPILL_SHARE", -1.0)  # hidden states in files give the same
    made = compress.apply(request, output=interrupted(request, stop), resume=True, quiet=True)
    for file in straight.path.glob("*.safetensors"):
        assert file.read_bytes() == (made.path / file.name).read_bytes()
    assert (straight.path / "compress.json").read_bytes() == (made.path / "compress.json").read_bytes()
    assert not (made.path / ".compress").exists()


@pytest.mark.parametrize("family", ["opt", "gpt2", "falcon", "bert"])
def test_heads_that_follow_from_the_hidden_size_are_a_reason(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, family: str
) -> None:
    if family == "bert":
        source = save(bert(), tmp_path / "bert")
    elif family in ("gpt2", "falcon"):
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4} if family == "gpt2" else SMALL["qwen2"]
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=257, **sizes))
        model.save_pretrained(tmp_path / family)
        byte_tokenizer().save_pretrained(tmp_path / family)
        source = tmp_path / family
    else:
        source = make_checkpoint(family)
    with pytest.raises(RequestError, match=r"structure\.remove: .*head_dim"):
        compress.apply(recipe(source, stage(keep=48)), output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_what_does_not_compute_the_same_is_refused(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = HiddenCut.__call__

    def wrong(self: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
        cut = real(self, name, tensor)
        return cut.flip(0) if name.endswith("layers.1.mlp.up_proj.weight") else cut

    monkeypatch.setattr(HiddenCut, "__call__", wrong)
    request = recipe(checkpoint("llama"), stage(keep=48))
    with pytest.raises(RequestError, match=r"model\.layers\.1 of a LlamaForCausalLM"):
        compress.apply(request, output=tmp_path / "out", quiet=True)


def test_a_block_that_differs_by_a_factor_is_refused(
    checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes a constant from its hidden size gives a multiple of what it should, and is otherwise right."""
    real = LlamaDecoderLayer.forward

    def scaled(self: Any, *arguments: Any, **options: Any) -> Any:
        return real(self, *arguments, **options) * (self.hidden_size / 64) ** 0.5

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    request = recipe(checkpoint("llama"), stage(keep=48))
    with pytest.raises(RequestError, match=r"model\.layers\.0 of a LlamaForCausalLM .*0\.866"):
        compress.apply(request, output=tmp_path / "out", quiet=True)


def test_weights_that_are_no_numbers(checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path) -> None:
    source = checkpoint("llama")
    held = tensors(source)
    held["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(held, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CompressError, match="NaN or Inf"):
        compress.apply(recipe(source, stage(keep=48)), output=tmp_path / "out", quiet=True)


def test_what_follows_sees_the_smaller_model(
    checkpoint: Callable[..., Path], recipe: Any, text: Path, tmp_path: Path
) -> None:
    request = recipe(
        checkpoint("qwen3"), stage(ratio="25%"), {"quantize": {"method": "gptq", "bits": 4, "group_size": 16}},
        evaluate={**UNLIMITED, "data": str(text), "sequence_length": 32, "samples": 8},
    )  # fmt: skip
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert json.loads((made.path / "config.json").read_text())["hidden_size"] == 48
    assert made.metrics["kl"] > 0
    cut = [entry for entry in made.manifest["tensors"].values() if "cut" in entry]
    assert len(cut) > 10
    with pytest.raises(RequestError, match=r"structure\.ratio"):
        compress.apply(recipe(checkpoint("llama"), stage(ratio=0.001)), output=tmp_path / "no", quiet=True)
