"""The stage `structure`: the shapes shrink, transformers loads the result without us, and it computes what the whole model computes when
nothing reads what was removed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from conftest import SMALL, byte_tokenizer
from encoder_models import bert, save, t5

import compress
import runtime
from compress.pipeline import plain
from compress.pipeline.plan import make_plan
from compress.recipe import load as load_recipe
from runtime.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError

BUNDLED = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints" / "stdlib-4m"
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
        with pytest.raises(RequestError, match="cannot say that it has fewer heads"):
            compress.apply(request, output=tmp_path / "out", quiet=True)
        assert not (tmp_path / "out").exists()
        return
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert sum(v.numel() for v in tensors(made.path).values()) < sum(v.numel() for v in tensors(source).values())
    ids = torch.randint(0, 256, (1, 12))
    ours = runtime.load(made.path).logits(ids)
    torch.testing.assert_close(ours, transformers_logits(made.path, ids), rtol=0.1, atol=0.1)
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


@pytest.mark.parametrize("remove", ["ffn", "layers"])
def test_an_encoder(recipe: Any, tmp_path: Path, remove: str) -> None:
    source = save(bert(), tmp_path / "bert")
    fields = {"keep": 48, **FFN} if remove == "ffn" else {"keep": 1, "remove": "layers"}
    method = "taylor" if remove == "ffn" else "block_influence"
    made = compress.apply(recipe(source, stage(method, **fields)), output=tmp_path / "out", quiet=True)
    states = runtime.load(made.path).hidden_states(torch.randint(0, 256, (2, 20)))
    assert states.shape == (2, 20, 64)
    config = json.loads((made.path / "config.json").read_text())
    assert (config["intermediate_size"], config["num_hidden_layers"]) == ((48, 2) if remove == "ffn" else (96, 1))


@pytest.mark.parametrize("remove", ["ffn", "layers", "heads"])
def test_an_encoder_decoder(recipe: Any, tmp_path: Path, remove: str) -> None:
    source = save(t5(num_layers=3, num_decoder_layers=3, tie_word_embeddings=False), tmp_path / "t5")
    fields = {"ffn": {"keep": 48, **FFN}, "layers": {"keep": 2}, "heads": {"keep": 2}}[remove]
    method = {"ffn": "taylor", "layers": "block_influence", "heads": "wanda"}[remove]
    request = recipe(source, stage(method, **{"remove": remove, **fields}))
    if remove == "heads":  # all layers of a stack add the position biases of the first
        with pytest.raises(RequestError, match="depend on each other"):
            compress.apply(request, output=tmp_path / "out", quiet=True)
        return
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert runtime.load(made.path).generate([5, 6, 7], max_new_tokens=4)
    if remove == "layers":
        assert all(kept[0] == 0 and len(kept) == 2 for kept in made.manifest["passes"][0]["kept"])


def test_refitted_readers_win_back_most_of_the_loss(tmp_path: Path) -> None:
    base = {
        "name": "test",
        "model": str(BUNDLED),
        "calibration": {"samples": 64, "sequence_length": 128},
        "evaluate": {"sequence_length": 128, "samples": 16},
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
    request = recipe(source, *stages, evaluate={"data": str(text), "sequence_length": 32, "samples": 8})
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


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_was_stopped_goes_on_with_the_same_bytes(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    source = make_checkpoint()
    request = recipe(source, stage("taylor", keep=64, **FFN), stage("block_influence", keep=2))
    straight = compress.apply(request, output=tmp_path / "straight", quiet=True)
    real, calls = plain.PlainWriter.write, []

    def write(self: Any, part: int, *arguments: Any) -> None:
        calls.append(part)
        if len(calls) > stop:
            raise KeyboardInterrupt
        real(self, part, *arguments)

    monkeypatch.setattr(plain.PlainWriter, "write", write)
    with pytest.raises(KeyboardInterrupt):
        compress.apply(request, output=tmp_path / "out", quiet=True)
    monkeypatch.undo()
    made = compress.apply(request, output=tmp_path / "out", resume=True, quiet=True)
    for file in straight.path.glob("*.safetensors"):
        assert file.read_bytes() == (made.path / file.name).read_bytes()
    assert (straight.path / "compress.json").read_bytes() == (made.path / "compress.json").read_bytes()


@pytest.mark.parametrize(("budget", "share"), [("parameters", 0.9), ("flops", 0.85)])
def test_budgets(make_checkpoint: Any, recipe: Any, tmp_path: Path, budget: str, share: float) -> None:
    source = make_checkpoint()
    request = recipe(source, stage("magnitude", budget={budget: share}, remove="ffn", multiple=4))
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    (facts,) = made.manifest["passes"]
    each = 3 * 3 * 64 * 4  # parameters of four channels, in three layers
    if budget == "parameters":
        whole = facts["parameters_before"]
        assert share * whole - each < facts["parameters_after"] <= share * whole
    else:
        assert 8 <= facts["after"] < 96


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
    with pytest.raises(RequestError, match=r"stages\.1\.structure: stage 0 \(quantize\).*put this one before"):
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
    with pytest.raises(CompressError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: the weight holds NaN"):
        compress.apply(recipe(source, stage("obs", keep=64, **FFN)), output=tmp_path / "out", quiet=True)
