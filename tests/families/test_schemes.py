"""What transformers' `from_pretrained` makes of artifacts, by their `quant_method`: with compressed-tensors alone, or with our loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, Family
from torch import nn

import compress
import runtime
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.engines.blueprint import Blueprint
from runtime.layers.compressed_linear import CompressedLinear

OURS, SHARED = "compress", "compressed-tensors"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ROUTED = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS = [
    Family("gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    Family("phimoe", {**SIZES, **ROUTED}),
    Family("llama4_text", {**SIZES, **ROUTED, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "head_dim": 16}),
]  # fmt: skip
NAMED = {family.name: family for family in (*FAMILIES, *OTHERS)}
IDS = torch.tensor([[3, 17, 80, 101, 5, 64, 33, 2, 90, 41, 12, 77]])
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i}: the square of {i} is {i * i}, its double {2 * i}.\n" for i in range(60)))
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{family: its checkpoint}, as far as they have been asked for."""
    root = tmp_path_factory.mktemp("models")

    class Made(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = NAMED[name].write(root / name)
            return self[name]

    return Made()


def quantize(scheme: str, *targets: str) -> dict[str, Any]:
    stage: dict[str, Any] = {"method": "rtn", "scheme": scheme}
    if scheme.startswith("W4"):
        stage["group_size"] = 32
    return {"quantize": stage | ({"targets": list(targets)} if targets else {})}


def make(source: Path, text: Path, out: Path, *stages: dict[str, Any]) -> Path:
    """An artifact."""
    calibration = {"data": str(text), "samples": 4, "sequence_length": 32, "batch_size": 4}
    recipe = {"name": "test", "model": str(source), "calibration": calibration, "stages": list(stages)}
    return compress.apply(recipe, output=out, quiet=True).path


def written(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization_config"]
    return config


def load(path: Path) -> Any:
    """By transformers. Layers of ours compute as the reference does: a rounding of what comes next may turn on a kernel's last bit."""
    import transformers

    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32).eval()
    for module in model.modules():
        if isinstance(module, CompressedLinear):
            module.prepare("reference")
    return model


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=IDS, use_cache=False).logits.float()
    return out


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def same(path: Path) -> bool:
    return distance(logits(load(path)), runtime.load(path, kernels="reference").logits(IDS)) < 1e-5


SCHEMES = {
    "W4A16": SHARED,
    "W4A16_ASYM": OURS,
    "W8A8-INT8": SHARED,
    "FP8": SHARED,
}  # of experts that have published names


@pytest.mark.sampled(2, 8)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", *MIXTURES])
def test_loads_as_it_says(name: str, scheme: str, sources: dict[str, Path], text: Path, tmp_path: Path) -> None:
    path = make(sources[name], text, tmp_path / "out", quantize(scheme))
    expected = {"llama": SHARED, "gpt_oss": OURS}.get(name, SCHEMES[scheme])
    assert written(path)["quant_method"] == expected
    if name in MIXTURES and expected == SHARED and scheme == "W8A8-INT8":
        with pytest.raises(RuntimeError):  # transformers puts no experts of 8-bit integers together
            load(path)
    elif name in MIXTURES and expected == SHARED and scheme == "FP8":
        assert _same_but_for_rounding(path)
    else:
        assert same(path)


def _same_but_for_rounding(path: Path) -> bool:
    """transformers does not round what experts read; the weights are the same, and near to that is the whole."""
    theirs = load(path)
    found = distance(logits(theirs), runtime.load(path, kernels="reference").logits(IDS))
    module = Blueprint(Artifact(path), torch.device("cpu"), "reference", None, False).build_module()
    ours = {
        n: m.dequantize() for n, m in module.named_modules() if isinstance(m, CompressedLinear) and ".experts." in n
    }
    for name, fused in theirs.named_modules():
        for number in range(4) if name.endswith(".experts") else ():
            own = [ours[f"{name}.{number}.{projection}"] for projection in ("gate_proj", "up_proj")]
            assert torch.equal(fused.gate_up_proj[number], torch.cat(own))
            assert torch.equal(fused.down_proj[number], ours[f"{name}.{number}.down_proj"])
    return 1e-3 < found < 0.15


ATTENTION, EXPERTS = "re:.*self_attn.*", "re:.*experts.*"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "stages", "method"),
    [
        ("mixtral", [quantize("W4A16", ATTENTION)], OURS),
        ("mixtral", [quantize("FP8_DYNAMIC", ATTENTION)], SHARED),
        ("mixtral", [quantize("W4A16", EXPERTS)], SHARED),
        ("mixtral", [quantize("W4A16", r"re:.*layers\.1\..*")], OURS),
        ("qwen3_moe", [quantize("W8A16", ATTENTION), quantize("W4A16_ASYM", EXPERTS)], OURS),
        ("gpt_oss", [quantize("W4A16", ATTENTION)], SHARED),
        ("llama", [quantize("W4A16_ASYM", ATTENTION), quantize("W8A16", "re:.*mlp.*")], OURS),
        ("llama", [quantize("W4A16_ASYM", ATTENTION), quantize("W8A8-INT8", "re:.*mlp.*")], OURS),
        ("llama", [quantize("W4A16", ATTENTION), quantize("W8A8-INT8", "re:.*mlp.*")], SHARED),
    ],
)
def test_parts_of_a_model(
    name: str, stages: list[dict[str, Any]], method: str, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    path = make(sources[name], text, tmp_path / "out", *stages)
    assert written(path)["quant_method"] == method
    assert same(path)


@pytest.mark.parametrize(
    ("name", "scheme", "method"),
    [
        ("gpt_bigcode", "W4A16", OURS),  # initialises a layer by its name, where compressed-tensors leaves no weight
        ("gpt_bigcode", "W8A8-INT8", SHARED),  # and here it leaves one
        ("gpt_bigcode", "W4A16_ASYM", SHARED),  # as it is where transformers unpacks while it loads
        ("llama4_text", "W4A16", OURS),  # transformers builds other experts for compressed-tensors
        ("phimoe", "W4A16", SHARED),
    ],
)
def test_how_transformers_builds_a_model_decides(
    name: str, scheme: str, method: str, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    path = make(sources[name], text, tmp_path / "out", quantize(scheme))
    assert written(path)["quant_method"] == method
    assert same(path)


def test_routers_that_are_linear_layers_too_are_ignored(sources: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """As "Linear", compressed-tensors means classes of models as well."""
    config = written(make(sources["phimoe"], text, tmp_path / "out", quantize("W4A16")))
    assert {group["targets"][0] for group in config["config_groups"].values()} == {"Linear"}
    assert {f"model.layers.{n}.mlp.router" for n in range(2)} < set(config["ignore"])


@pytest.mark.parametrize("scheme", ["FP8", "W8A8-INT8"])
def test_what_our_loader_has_loaded_is_saved_again(
    scheme: str, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    """Stored tensors that are called `weight` too."""
    path = make(sources["gpt_oss"], text, tmp_path / "out", quantize(scheme))
    model = load(path)
    model.save_pretrained(tmp_path / "again")
    before, after = Checkpoint(path), Checkpoint(tmp_path / "again")
    assert set(after.names()) == set(before.names())
    assert all(torch.equal(after.get(n).float(), before.get(n).float()) for n in before.names())
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))
    model.dequantize()
    assert not any(isinstance(module, CompressedLinear) for module in model.modules())


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC"])
def test_experts_round_what_they_read(scheme: str, sources: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """The scheme by hand, in transformers' own Mixtral: every layer, and every layer of every expert, rounds its own input."""
    path = make(sources["mixtral"], text, tmp_path / "out", quantize(scheme))
    module = Blueprint(Artifact(path), torch.device("cpu"), "reference", None, False).build_module()
    layers = {n: m for n, m in module.named_modules() if isinstance(m, CompressedLinear)}
    got = runtime.load(path, kernels="reference").logits(IDS)
    assert distance(got, logits(_by_hand(sources["mixtral"], layers, True))) < 1e-2  # one value may round otherwise
    assert distance(got, logits(_by_hand(sources["mixtral"], layers, False))) > 3e-2


def _by_hand(source: Path, layers: dict[str, CompressedLinear], rounds: bool) -> Any:
    """transformers' model with dense weights; `rounds`: experts round what they read too."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()

    def product(name: str, x: torch.Tensor, rounded: bool = True) -> torch.Tensor:
        layer = layers[name]
        x = _rounded(x, layer) if rounded else x
        return nn.functional.linear(x, layer.dequantize())

    def experts(name: str) -> Any:
        def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(hidden)
            for token, choice in torch.cartesian_prod(torch.arange(len(hidden)), torch.arange(index.shape[1])).tolist():
                x, own = hidden[token], f"{name}.{int(index[token, choice])}"
                gate = nn.functional.silu(product(f"{own}.gate_proj", x, rounds))
                inner = gate * product(f"{own}.up_proj", x, rounds)
                out[token] += weights[token, choice] * product(f"{own}.down_proj", inner, rounds)
            return out

        return forward

    for name, module in model.named_modules():
        if name in layers:
            module.forward = lambda x, name=name: product(name, x)
        elif name.endswith(".experts"):
            module.forward = experts(name)
    return model


def _rounded(x: torch.Tensor, layer: CompressedLinear) -> torch.Tensor:
    """What 8-bit floats keep of `x` `[..., in]`: a scale for each token, or the layer's own."""
    scale: Any = layer._buffers.get("input_scale")
    scale = x.abs().amax(-1, keepdim=True) / 448 if scale is None else scale
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
