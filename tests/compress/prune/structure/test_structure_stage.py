"""The stage `structure`: the shapes shrink, transformers loads the result without us, and it computes what the whole model computes when
nothing reads what was removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, VOCABULARY, byte_tokenizer
from encoder_models import bert, save, t5
from random_models import UNLIMITED
from safetensors.torch import load_file

import compress
import runtime
from compress.core.tensors import relative
from compress.model.context import Context
from compress.recipe import load as load_recipe
from compress.run.plan import make_plan
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError

BUNDLED = Path(__file__).resolve().parents[4] / "recipes" / "checkpoints" / "stdlib-4m"
FFN = {"remove": "ffn", "multiple": 1}


def stage(method: str = "magnitude", **fields: Any) -> dict[str, Any]:
    return {"structure": {"method": method, **fields}}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def transformers_logits(path: Path, ids: torch.Tensor, hide: Callable[[Any], Any] | None = None) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if hide is not None:
        hide(model)
    with torch.no_grad():
        return model(input_ids=ids).logits


def rows_of(part: torch.Tensor, whole: torch.Tensor) -> list[int]:
    """Which rows of `whole` those of `part` are."""
    return [next(i for i, row in enumerate(whole) if torch.equal(row, wanted)) for wanted in part]


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "gradient_free", "taylor", "obs", "random", "prefix"])
def test_channels_are_gone_and_nothing_else_changed(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, method: str
) -> None:
    source = make_checkpoint(dtype=torch.float32)
    made = compress.apply(
        recipe(source, stage(method, ratio=0.25, reconstruct=False, **FFN)), output=tmp_path / "out", quiet=True
    )
    config = json.loads((made.path / "config.json").read_text())
    assert config["intermediate_size"] == 72
    assert "quantization_config" not in config
    before, after = tensors(source), tensors(made.path)
    kept = {}
    for layer in range(3):
        name = f"model.layers.{layer}.mlp."
        kept[name] = rows_of(after[f"{name}up_proj.weight"], before[f"{name}up_proj.weight"])
        assert kept[name] == sorted(set(kept[name]))
        assert torch.equal(after[f"{name}gate_proj.weight"], before[f"{name}gate_proj.weight"][kept[name]])
        assert torch.equal(after[f"{name}down_proj.weight"], before[f"{name}down_proj.weight"][:, kept[name]])
    if method == "prefix":
        assert all(own == list(range(72)) for own in kept.values())
    others = {name for name in before if ".mlp." not in name}
    assert all(torch.equal(before[name], after[name]) for name in others)

    def hide(model: Any) -> None:
        for layer in range(3):
            weight = model.model.layers[layer].mlp.down_proj.weight.data
            weight[:, [c for c in range(96) if c not in kept[f"model.layers.{layer}.mlp."]]] = 0

    ids = torch.randint(0, 256, (2, 20))
    torch.testing.assert_close(
        transformers_logits(made.path, ids), transformers_logits(source, ids, hide), rtol=1e-4, atol=1e-4
    )
    assert runtime.load(made.path).generate([5, 6, 7], max_new_tokens=4)


@pytest.mark.sampled(4, 8)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "opt", "phi3", "gpt2"])
@pytest.mark.parametrize("remove", ["ffn", "heads", "layers"])
def test_families(make_checkpoint: Any, recipe: Any, tmp_path: Path, family: str, remove: str) -> None:
    if family == "phi3":
        source = _other(
            "phi3", tmp_path, **SMALL["qwen2"], **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 256)
        )
    elif family == "gpt2":
        source = _other("gpt2", tmp_path, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    else:
        source = make_checkpoint(family)
    method = "block_influence" if remove == "layers" else "obs"
    fields = {"keep": {"ffn": 64, "heads": 1 if family != "opt" else 2, "layers": 1}[remove], "remove": remove}
    request = recipe(source, stage(method, **fields))
    if remove == "heads" and family in ("opt", "gpt2"):
        with pytest.raises(RequestError, match="heads"):
            compress.apply(request, output=tmp_path / "out", quiet=True)
        assert not (tmp_path / "out").exists()
        return
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert sum(v.numel() for v in tensors(made.path).values()) < sum(v.numel() for v in tensors(source).values())
    ids = torch.randint(0, 256, (1, 12))
    ours = runtime.load(made.path).logits(ids)
    assert relative(ours, transformers_logits(made.path, ids)) < 0.03  # rounding to bf16 in every operation
    (facts,) = made.manifest["passes"]
    assert facts["after"] == fields["keep"] < facts["before"]
    assert facts["parameters_after"] < facts["parameters_before"]
    assert all(entry["action"] in ("copied", "dropped") for entry in made.manifest["tensors"].values())
    assert set(Checkpoint(source).names()) <= set(made.manifest["tensors"])


def _other(family: str, tmp_path: Path, **settings: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=257, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
    model.save_pretrained(tmp_path / family)
    byte_tokenizer().save_pretrained(tmp_path / family)
    return tmp_path / family


def encoder_states(path: Path, ids: torch.Tensor, hide: Callable[[Any], Any] | None = None) -> torch.Tensor:
    """What transformers makes of an encoder, after each layer: `[layers + 1, b, s, hidden]`."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    if hide is not None:
        hide(model)
    with torch.no_grad():
        return torch.stack(model(input_ids=ids, output_hidden_states=True).hidden_states)


def test_channels_of_an_encoder(recipe: Any, text: Path, tmp_path: Path) -> None:
    source = save(bert(), tmp_path / "bert")
    before, found = tensors(source), {}
    for fitted in (False, True):
        request = recipe(source, stage("taylor", keep=48, reconstruct=fitted, **FFN))
        made = compress.apply(request, output=tmp_path / f"fitted-{fitted}", quiet=True)
        found[fitted] = tensors(made.path)
        assert found[fitted].keys() == before.keys()
        config = json.loads((made.path / "config.json").read_text())
        assert (config["intermediate_size"], config["num_hidden_layers"]) == (48, 2)
    kept = []
    for layer in range(2):
        up, down = (f"encoder.layer.{layer}.{name}" for name in ("intermediate.dense", "output.dense"))
        kept.append(rows_of(found[False][f"{up}.weight"], before[f"{up}.weight"]))
        assert len(kept[layer]) == 48
        assert kept[layer] == sorted(set(kept[layer]))
        for own in found.values():  # what reads the channels may be fitted, what writes them stays
            assert torch.equal(own[f"{up}.weight"], before[f"{up}.weight"][kept[layer]])
            assert torch.equal(own[f"{up}.bias"], before[f"{up}.bias"][kept[layer]])
            assert own[f"{down}.weight"].shape == (64, 48)
        assert torch.equal(found[False][f"{down}.weight"], before[f"{down}.weight"][:, kept[layer]])
        assert not torch.equal(found[True][f"{down}.weight"], found[False][f"{down}.weight"])
    cut = ("intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight")
    same = [name for name in before if "attention" in name or not name.endswith(cut)]
    assert len(before) - len(same) == 2 * 3
    for own in found.values():
        assert all(torch.equal(own[name], before[name]) for name in same)

    def hide(model: Any) -> None:
        for layer, chosen in zip(model.encoder.layer, kept, strict=True):
            layer.output.dense.weight.data[:, [c for c in range(96) if c not in chosen]] = 0

    ids = torch.tensor(byte_tokenizer()(text.read_text())["input_ids"][:320]).view(10, 32)
    whole, without = encoder_states(source, ids), encoder_states(source, ids, hide)
    plain, fitted = (encoder_states(tmp_path / f"fitted-{name}", ids) for name in (False, True))
    torch.testing.assert_close(plain, without, rtol=1e-4, atol=1e-4)
    lost, left = ((states[-1] - whole[-1]).square().mean() for states in (plain, fitted))
    assert 0 < left < 0.8 * lost
    ours = runtime.load(tmp_path / "fitted-False").hidden_states(ids)
    torch.testing.assert_close(ours, without[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", [1, 3])
def test_layers_of_an_encoder(recipe: Any, tmp_path: Path, keep: int) -> None:
    source = save(bert(num_hidden_layers=4), tmp_path / "bert")
    request = recipe(source, stage("block_influence", keep=keep))
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    (kept,) = made.manifest["passes"][0]["kept"]
    batches = Context.open(load_recipe(request), Checkpoint(source), "cpu").batches
    passed = encoder_states(source, torch.cat([ids for ids, _ in batches]))
    turned = torch.stack([1 - torch.cosine_similarity(*passed[n : n + 2], dim=-1).mean() for n in range(4)])
    assert kept == turned.argsort(descending=True)[:keep].sort().values.tolist() != list(range(keep))
    assert json.loads((made.path / "config.json").read_text())["num_hidden_layers"] == keep
    before, after = tensors(source), tensors(made.path)
    outside = [name for name in before if not name.startswith("encoder.layer.")]
    assert len(after) == len(outside) + (len(before) - len(outside)) // 4 * keep
    assert all(torch.equal(after[name], before[name]) for name in outside)

    def hide(model: Any) -> None:
        model.encoder.layer = torch.nn.ModuleList(model.encoder.layer[layer] for layer in kept)

    ids = torch.randint(0, 256, (2, 20))
    states, without = encoder_states(made.path, ids), encoder_states(source, ids, hide)
    assert states.shape == (keep + 1, 2, 20, 64)
    torch.testing.assert_close(states, without)
    torch.testing.assert_close(runtime.load(made.path).hidden_states(ids), without[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("remove", ["ffn", "layers", "heads"])
def test_an_encoder_decoder(recipe: Any, tmp_path: Path, remove: str) -> None:
    source = save(t5(num_layers=3, num_decoder_layers=3, tie_word_embeddings=False), tmp_path / "t5")
    fields = {"ffn": {"keep": 48, **FFN}, "layers": {"keep": 2}, "heads": {"keep": 2}}[remove]
    method = {"ffn": "taylor", "layers": "block_influence", "heads": "wanda"}[remove]
    request = recipe(source, stage(method, **{"remove": remove, **fields}))
    if remove == "heads":  # all layers of a stack add the position biases of the first
        with pytest.raises(RequestError, match=r"block\.1 of a T5ForConditionalGeneration"):
            compress.apply(request, output=tmp_path / "out", quiet=True)
        return
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert runtime.load(made.path).generate([5, 6, 7], max_new_tokens=4)
    if remove == "layers":
        assert all(kept[0] == 0 and len(kept) == 2 for kept in made.manifest["passes"][0]["kept"])


@pytest.mark.slow
def test_refitted_readers_win_back_most_of_the_loss(tmp_path: Path) -> None:
    base = {
        "name": "test",
        "model": str(BUNDLED),
        "calibration": {"samples": 64, "sequence_length": 128},
        "evaluate": {**UNLIMITED, "sequence_length": 128, "samples": 16},
    }
    loss = {}
    for method, fitted in (("random", False), ("random", True), ("wanda", False), ("wanda", True), ("obs", True)):
        recipe = {**base, "stages": [stage(method, ratio=0.2, reconstruct=fitted)]}
        made = compress.apply(recipe, output=tmp_path / f"{method}{fitted}", quiet=True)
        loss[method, fitted] = made.metrics["perplexity_increase"]
        errors = [layer["error"] for layer in made.manifest["passes"][0]["layers"]]
        if fitted:
            assert [0 < error < 0.2 for error in errors] == [True] * 4, errors
        else:
            assert errors == [None] * 4  # nobody asked for second moments
    assert loss["random", True] < 0.65 * loss["random", False]
    assert loss["obs", True] < loss["wanda", True] < loss["wanda", False] < loss["random", False]


def test_layers_that_hardly_do_anything_go_first(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint(dtype=torch.float32, num_hidden_layers=5, shards="40KB")
    from safetensors.torch import save_file

    for file in source.glob("*.safetensors"):
        held = load_file(file)
        for layer in (1, 3):  # their outputs vanish in the residual stream
            for name in (f"model.layers.{layer}.mlp.down_proj.weight", f"model.layers.{layer}.self_attn.o_proj.weight"):
                if name in held:
                    held[name] = held[name] * 1e-3
        save_file(held, file, {"format": "pt"})
    made = compress.apply(recipe(source, stage("block_influence", keep=3)), output=tmp_path / "out", quiet=True)
    assert made.manifest["passes"][0]["kept"] == [[0, 2, 4]]
    ids = torch.randint(0, 256, (1, 16))
    torch.testing.assert_close(
        transformers_logits(made.path, ids), transformers_logits(source, ids), rtol=0.05, atol=0.05
    )


def test_stages_follow_each_other_and_the_rest_comes_after(
    make_checkpoint: Any, recipe: Any, text: Path, tmp_path: Path
) -> None:
    source = make_checkpoint()
    stages = (
        stage("obs", keep=64, **FFN),
        stage("taylor", remove="heads", ratio="50%"),
        stage("block_influence", keep=2),
        {"prune": {"method": "sparsegpt", "pattern": "2:4"}},
        {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}},
    )
    request = recipe(source, *stages, evaluate={**UNLIMITED, "data": str(text), "sequence_length": 32, "samples": 8})
    plan = make_plan(load_recipe(request), tmp_path / "out")
    assert len(plan.passes) == 3
    assert "ffn 96 -> 64 channels by obs" in plan.headline()
    assert plan.model == str(source)
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert abs(plan.bytes_after - made.manifest["bytes"]["after"]) < 0.02 * plan.bytes_after
    assert plan.bytes_before == made.manifest["bytes"]["before"] == Checkpoint(source).total_bytes
    assert [done["remove"] for done in made.manifest["passes"]] == ["ffn", "heads", "layers"]
    config = json.loads((made.path / "config.json").read_text())
    wanted = {
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert made.metrics["kl"] > 0
    assert not (made.path / ".compress").exists()
    gone = [name for name, entry in made.manifest["tensors"].items() if entry["action"] == "dropped"]
    assert gone
    assert all(name.startswith("model.layers.2.") for name in gone)
    assert runtime.load(made.path).generate([5, 6, 7], max_new_tokens=4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_run_that_was_stopped_goes_on_with_the_same_bytes(
    make_checkpoint: Any, recipe: Any, interrupted: Callable[..., Path], tmp_path: Path, stop: int
) -> None:
    source = make_checkpoint()
    request = recipe(source, stage("taylor", keep=64, **FFN), stage("block_influence", keep=2))
    straight = compress.apply(request, output=tmp_path / "straight", quiet=True)
    made = compress.apply(request, output=interrupted(request, stop), resume=True, quiet=True)
    for file in straight.path.glob("*.safetensors"):
        assert file.read_bytes() == (made.path / file.name).read_bytes()
    assert (straight.path / "compress.json").read_bytes() == (made.path / "compress.json").read_bytes()


def by_hand(budget: str, channels: int, tied: bool) -> int:
    """What a Llama of `SMALL` has of parameters, or takes of operations for a token that follows 32 others."""
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64  # 4 heads of 16 numbers, 2 of keys and of values
    linear = 3 * (attention + 3 * 64 * channels)
    if budget == "parameters":
        norms = 7 * 64
        return linear + norms + (1 if tied else 2) * 64 * VOCABULARY
    seen = 3 * 2 * 32 * 64  # of each head and layer: a query with all keys, and their shares with all values
    return 2 * (linear + seen + 64 * VOCABULARY)  # embeddings are looked up; a head is multiplied with, tied or not


@pytest.mark.sampled(2, 3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("budget", "share", "multiple"),
    [("parameters", 0.9, 4), ("flops", 0.85, 4), ("flops", 0.85, 1), ("flops", 0.63, 1)],
)
def test_budgets(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, budget: str, share: float, multiple: int, tied: bool
) -> None:
    source = make_checkpoint(tie_word_embeddings=tied)
    request = recipe(source, stage("magnitude", budget={budget: share}, remove="ffn", multiple=multiple))
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    (facts,) = made.manifest["passes"]
    allowed = share * by_hand(budget, 96, tied)
    wanted = max(n for n in range(multiple, 96, multiple) if by_hand(budget, n, tied) <= allowed)
    assert facts["after"] == wanted == json.loads((made.path / "config.json").read_text())["intermediate_size"]
    assert facts["parameters_before"] == by_hand("parameters", 96, tied)
    assert facts["parameters_after"] == by_hand("parameters", wanted, tied)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"method": "magnitude", "ratio": 0.999, "remove": "heads"},
            ["structure.ratio", "leaves 0.0", "nearest", "1 (50.0%)"],
        ),
        ({"method": "magnitude", "ratio": 0.01, "remove": "ffn"}, ["structure.ratio", "96 channels", "64"]),
        ({"method": "magnitude", "keep": 96, "remove": "ffn"}, ["structure.keep", "1 to 95"]),
        ({"method": "magnitude", "keep": 3, "remove": "layers"}, ["structure.keep", "1 to 2", "layers"]),
        ({"method": "wanda", "keep": 2, "remove": "layers"}, ["structure.remove", "wanda ranks", "block_influence"]),
        ({"method": "magnitude"}, ["one of ratio, keep and budget", "none"]),
        ({"method": "magnitude", "keep": 2, "ratio": 0.5}, ["ratio and keep are given"]),
        ({"method": "magnitude", "ratio": 20}, ["did you mean 20%"]),
        ({"method": "magnitude", "budget": {"parameters": "1%"}}, ["structure.budget.parameters", "still takes"]),
        ({"method": "magnitude", "budget": {}}, ["one of parameters, flops and latency"]),
        ({"method": "magnitudo", "ratio": 0.5}, ["magnitudo", "did you mean"]),
        ({"method": "magnitude", "keep": 50, "multiple": 32}, ["no multiple of 32"]),
        ({"method": "magnitude", "keep": 50, "remove": "neurons"}, ["remove", "neurons"]),
        (
            {"method": "magnitude", "keep": 3, "remove": "heads"},
            ["structure.remove", "cannot be built", "not a multiple"],
        ),
    ],
)
def test_what_cannot_be_is_refused(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, fields: Any, words: list[str]
) -> None:
    # Of 4 groups of 2 heads 3 would be 6 heads, which 64 dimensions cannot be shared by.
    groups = {"num_attention_heads": 8, "num_key_value_heads": 4} if fields.get("keep") == 3 else {}
    source = make_checkpoint(**groups)
    with pytest.raises(RequestError) as error:
        compress.apply(recipe(source, {"structure": fields}), output=tmp_path / "out", quiet=True)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert not (tmp_path / "out").exists()


def test_layers_of_kinds_that_take_turns(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint("gemma2", num_hidden_layers=4, dtype=torch.float32)
    stages = (stage("random", keep=2, remove="layers", seed=2), stage("obs", keep=64, **FFN))
    made = compress.apply(recipe(source, *stages), output=tmp_path / "out", quiet=True)
    kept = made.manifest["passes"][0]["kept"][0]
    before, after = (json.loads((path / "config.json").read_text())["layer_types"] for path in (source, made.path))
    assert after == [before[layer] for layer in kept]
    assert after != before[:2]


@pytest.mark.parametrize("family", ["opt", "gpt2", "qwen3"])
def test_gradients_of_all_families(make_checkpoint: Any, recipe: Any, tmp_path: Path, family: str) -> None:
    source = _other("gpt2", tmp_path, n_embd=64, n_layer=2, n_head=4) if family == "gpt2" else make_checkpoint(family)
    made = compress.apply(recipe(source, stage("taylor", keep=64, **FFN)), output=tmp_path / "out", quiet=True)
    assert made.manifest["passes"][0]["after"] == 64


def test_layers_are_compressed_last(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    stages = ({"quantize": {"method": "rtn", "bits": 8}}, stage(ratio=0.5))
    with pytest.raises(RequestError, match=r"stages\.1\.structure: stage 0 \(quantize\)"):
        compress.apply(recipe(make_checkpoint(), *stages), output=tmp_path / "out", quiet=True)
    # What comes after is held against the shapes that there will be: 50 columns are no whole eights.
    stages = (stage(keep=50), {"prune": {"method": "magnitude", "pattern": "4:8"}})
    with pytest.raises(RequestError, match=r"prune\.pattern.*50"):
        compress.apply(recipe(make_checkpoint(), *stages), output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_no_numbers(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = make_checkpoint()
    file = source / "model.safetensors"
    held = load_file(file)
    held["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(held, file, {"format": "pt"})
    with pytest.raises(CompressError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: .*NaN"):
        compress.apply(recipe(source, stage("obs", keep=64, **FFN)), output=tmp_path / "out", quiet=True)
