"""Experts are removed: what is left gives what the whole model gives when its routers cannot choose those that went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCABULARY, byte_tokenizer
from random_models import UNLIMITED
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import compress
import runtime
from compress.model.streamed import StreamedModel
from compress.recipe import load as load_recipe
from compress.run.plan import make_plan
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import RequestError

COMMON = {
    "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts_per_tok": 2, "vocab_size": VOCABULARY, "pad_token_id": 0,
    "eos_token_id": 256,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
    "qwen3_moe": {"num_experts": 6, "head_dim": 16, "norm_topk_prob": True},
    "olmoe": {"num_experts": 6},
    "gpt_oss": {"num_local_experts": 6, "head_dim": 16},
    # 1 / sqrt(head size); of its default, 1, scores are so sharp that float32 itself is off by 1e-4.
    "granitemoe": {"num_local_experts": 6, "attention_multiplier": 0.25},
    "deepseek_v3": {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, **LATENT},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint(family, **config)`: a random one in float32, as transformers writes it."""

    def make(family: str, fused: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        torch.manual_seed(len(family))
        config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, (4 if "router" in name or "gate.weight" in name else 1.5) / 8)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.05)
        path = tmp_path / f"{family}{'-fused' if fused else ''}"
        model.save_pretrained(path, save_original_format=not fused)
        byte_tokenizer().save_pretrained(path)
        return path

    return make


def stage(method: str = "routing", **fields: Any) -> dict[str, Any]:
    return {"structure": {"method": method, "remove": "experts", **fields}}


def logits(path: Path, ids: torch.Tensor, gone: dict[str, list[int]] | None = None) -> torch.Tensor:
    """What transformers computes; experts that are `gone`, by the module that holds them, are never chosen: routers computed by hand."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for name, experts in (gone or {}).items():
        parent = model.get_submodule(name.rpartition(".")[0])
        router = getattr(parent, "gate", None) or parent.router
        router.forward = by_hand(router, model.config, experts)
    with torch.no_grad():
        return model(input_ids=ids).logits


def by_hand(router: Any, config: Any, gone: list[int]) -> Callable[[torch.Tensor], Any]:
    """The routing of the family's paper, with logits of minus infinity."""
    chosen, family = config.num_experts_per_tok, config.model_type

    def forward(hidden: torch.Tensor) -> Any:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        found = hidden @ router.weight.T + (router.bias if family == "gpt_oss" else 0)
        found[:, gone] = -torch.inf
        if family == "deepseek_v3":
            score = found.sigmoid()
            choice = (score + router.e_score_correction_bias).masked_fill(found.isinf(), -torch.inf)
            groups = choice.view(len(choice), config.n_group, -1)
            best = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
            allowed = torch.zeros(len(choice), config.n_group).scatter(1, best, 1).bool()
            index = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1).topk(chosen, dim=-1).indices
            weight = score.gather(1, index)
            return found, weight / weight.sum(-1, keepdim=True) * config.routed_scaling_factor, index
        share = found.softmax(-1)
        weight, index = share.topk(chosen, dim=-1)
        if family in ("mixtral", "gpt_oss", "granitemoe") or config.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdim=True)
        return found, weight, index

    return forward


@pytest.mark.sampled(3, 4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["routing", "magnitude"])
def test_the_rest_computes_what_the_whole_does_without_them(
    checkpoint: Any, recipe: Any, tmp_path: Path, family: str, method: str
) -> None:
    source = checkpoint(family)
    keep = 9 if family == "deepseek_v3" else 4
    made = compress.apply(recipe(source, stage(method, keep=keep)), output=tmp_path / "out", quiet=True)
    (facts,) = made.manifest["passes"]
    total = facts["before"]
    gone = {layer["name"]: [e for e in range(total) if e not in layer["experts"]] for layer in facts["layers"]}
    assert len(gone) == (2 if family in ("qwen2_moe", "deepseek_v3") else 3)
    assert all(len(experts) == total - keep for experts in gone.values())
    if family == "deepseek_v3":  # three of each group of four
        assert all(sorted(expert // 4 for expert in experts) == [0, 1, 2] for experts in gone.values())
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
    whole, smaller = logits(source, ids), logits(made.path, ids)
    torch.testing.assert_close(smaller, logits(source, ids, gone), rtol=1e-4, atol=1e-4)
    assert (smaller - whole).abs().max() > 0.01  # they were used
    torch.testing.assert_close(runtime.load(made.path).logits(ids), smaller, rtol=1e-4, atol=1e-4)
    assert facts["parameters_after"] < facts["parameters_before"]
    errors = [layer["error"] for layer in facts["layers"]]
    assert all(0 < error < 2 for error in errors) if method == "routing" else errors == [None] * len(errors)


def test_routing_is_what_the_router_gives(checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = checkpoint("mixtral", num_hidden_layers=1)
    request = load_recipe(recipe(source, stage("routing", keep=4)))
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    (layer,) = made.manifest["passes"][0]["layers"]
    from compress.model.context import Context

    batches = Context.open(request, Checkpoint(source), "cpu").batches
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    weight, used, output = torch.zeros(6), torch.zeros(6), torch.zeros(6)
    experts = model.model.layers[0].mlp.experts

    def look(_module: Any, args: tuple[Any, ...]) -> None:
        hidden, index, given = args
        for x, chosen, weights in zip(hidden, index.tolist(), given.tolist(), strict=True):
            for expert, share in zip(chosen, weights, strict=True):
                gate, up = (experts.gate_up_proj[expert] @ x).chunk(2)
                y = experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                weight[expert] += share
                used[expert] += 1
                output[expert] += share * y.norm()

    experts.register_forward_pre_hook(look)
    with torch.no_grad():
        for ids, mask in batches:
            assert mask is None
            model(input_ids=ids)
    assert layer["experts"] == sorted(weight.argsort(descending=True)[:4].tolist())
    assert layer["notes"]["routing_weight_kept"] == pytest.approx(
        float(weight[layer["experts"]].sum() / weight.sum()), abs=1e-4
    )
    other = compress.apply(recipe(source, stage("reap", keep=4)), output=tmp_path / "reap", quiet=True)
    best = (output / used.clamp_min(1)).argsort(descending=True)[:4]
    assert other.manifest["passes"][0]["layers"][0]["experts"] == sorted(best.tolist())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_are_stored_one_by_one_are_put_together(checkpoint: Any, family: str) -> None:
    apart, whole = (StreamedModel(Checkpoint(checkpoint(family, fused=fused))) for fused in (False, True))
    assert not whole.checkpoint.converted
    assert len(apart.checkpoint.converted) == 6
    assert apart.checkpoint.names() == whole.checkpoint.names()
    for name in whole.checkpoint.names():
        assert torch.equal(apart.checkpoint.get(name), whole.checkpoint.get(name)), name
        assert apart.checkpoint.nbytes(name) == whole.checkpoint.nbytes(name)


def test_the_file_says_the_number_under_the_name_that_it_had(checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = checkpoint("qwen3_moe")
    config = json.loads((source / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")  # as checkpoints on the hub have it
    (source / "config.json").write_text(json.dumps(config))
    made = compress.apply(recipe(source, stage("random", ratio="50%")), output=tmp_path / "out", quiet=True)
    written = json.loads((made.path / "config.json").read_text())
    assert written["num_experts"] == 3
    assert "num_local_experts" not in written
    assert AutoConfig.from_pretrained(made.path).num_experts == 3


def test_the_result_can_be_quantized_and_has_published_names(
    checkpoint: Any, recipe: Any, text: Path, tmp_path: Path
) -> None:
    source = checkpoint("mixtral", dtype=torch.bfloat16)
    stages = (stage("reap", keep=4), {"quantize": {"method": "rtn", "bits": 8, "group_size": 32}})
    evaluate = {**UNLIMITED, "data": str(text), "sequence_length": 32, "samples": 4}
    request = recipe(source, *stages, evaluate=evaluate)
    plan = make_plan(load_recipe(request), tmp_path / "out")
    assert plan.passes == ["experts 6 -> 4 experts by reap"]
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert runtime.load(made.path).generate([5, 6, 7], max_new_tokens=4)
    assert made.metrics["kl"] > 0
    plain = compress.apply(recipe(source, stages[0]), output=tmp_path / "plain", quiet=True)
    names = {key for file in plain.path.glob("*.safetensors") for key in load_file(file)}
    theirs = {key for file in source.glob("*.safetensors") for key in load_file(file)}
    assert names == {name for name in theirs if ".experts.4." not in name and ".experts.5." not in name}
    assert "model.layers.2.block_sparse_moe.experts.3.w1.weight" in names
    assert AutoModelForCausalLM.from_pretrained(plain.path).config.num_local_experts == 4
    packed = {key for file in made.path.glob("*.safetensors") for key in load_file(file)}
    assert "model.layers.2.block_sparse_moe.experts.3.w1.weight_packed" in packed


def test_a_run_that_was_stopped_goes_on(
    checkpoint: Any, recipe: Any, interrupted: Callable[..., Path], tmp_path: Path
) -> None:
    request = recipe(checkpoint("olmoe"), stage("reap", keep=4))
    straight = compress.apply(request, output=tmp_path / "straight", quiet=True)
    made = compress.apply(request, output=interrupted(request, 2), resume=True, quiet=True)
    for file in [*straight.path.glob("*.safetensors"), straight.path / "compress.json"]:
        assert file.read_bytes() == (made.path / file.name).read_bytes()


def test_operations_are_those_of_the_experts_that_a_token_is_sent_to(checkpoint: Any) -> None:
    from compress.model.config_sizes import resized
    from compress.prune.structure.amount import flops

    streamed = StreamedModel(Checkpoint(checkpoint("mixtral")))

    def count(what: Any, kept: int) -> float:
        return flops(resized(streamed.config, what, kept), streamed, context=10)

    attention = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64) + 4 * 10 * 64
    layer = attention + 2 * 6 * 64 + 2 * 2 * 3 * 48 * 64  # the router, and two experts of three matrices
    assert count("layers", 3) == 3 * layer + 2 * 64 * VOCABULARY
    assert count("layers", 1) == layer + 2 * 64 * VOCABULARY
    assert count("experts", 6) - count("experts", 4) == 3 * 2 * 2 * 64  # rows of routers


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("mixtral", {"keep": 1}, ["structure.keep", "2 to 5 can be kept (a token is sent to 2 of them), not 1"]),
        ("mixtral", {"ratio": "80%"}, ["structure.ratio", "too few", "nearest", "2 (33.3%)"]),
        ("deepseek_v3", {"keep": 10}, ["structure.keep", "10 is no multiple of 3"]),
        ("deepseek_v3", {"keep": 3}, ["structure.keep", "6 to 11 can be kept"]),
        ("mixtral", {"method": "obs", "keep": 4}, ["obs ranks ffn, heads, not experts", "routing"]),
        ("mixtral", {"budget": {"flops": "50%"}}, ["structure.budget.flops", "still takes"]),
    ],
)
def test_what_cannot_be_is_refused(
    checkpoint: Any, recipe: Any, tmp_path: Path, family: str, fields: Any, words: list[str]
) -> None:
    with pytest.raises(RequestError) as error:
        compress.apply(recipe(checkpoint(family), stage(**fields)), output=tmp_path / "out", quiet=True)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("fields", "key"), [({"keep": 3}, "keep"), ({"ratio": "25%"}, "remove")])
def test_where_no_expert_can_go_that_is_said(
    checkpoint: Any, recipe: Any, tmp_path: Path, fields: dict[str, Any], key: str
) -> None:
    source = checkpoint("deepseek_v3", n_routed_experts=4, n_group=2, topk_group=1)
    words = rf"structure\.{key}: none of 4 experts can go: 4 are needed for a token, in multiples of 2"
    with pytest.raises(RequestError, match=words):
        compress.apply(recipe(source, stage(**fields)), output=tmp_path / "out", quiet=True)


def test_models_without_experts_and_with_others_are_refused(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"structure\.remove.*experts"):
        compress.apply(recipe(make_checkpoint(), stage(keep=2)), output=tmp_path / "out", quiet=True)
    torch.manual_seed(0)
    settings = {**COMMON, "num_local_experts": 4, "kv_channels": 16}
    del settings["num_attention_heads"]
    AutoModelForCausalLM.from_config(AutoConfig.for_model("jetmoe", **settings)).save_pretrained(tmp_path / "jetmoe")
    byte_tokenizer().save_pretrained(tmp_path / "jetmoe")
    with pytest.raises(RequestError, match=r"layers\.0 .* \d modules"):
        compress.apply(recipe(tmp_path / "jetmoe", stage(keep=2)), output=tmp_path / "out", quiet=True)
