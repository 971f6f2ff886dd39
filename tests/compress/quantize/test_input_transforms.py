"""Input transforms: the same function in another basis, statistics as of transformed inputs, and what learning gains."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_cases import random_weight

import compress
import runtime
from compress.core.orthogonal import why_not
from compress.core.statistics import Statistics, StatisticsCollector
from compress.quantize.config import QuantizeConfig
from compress.quantize.presets import check_fits, resolve_scheme
from compress.quantize.transforms import METHODS, Basis, Layers, flatquant
from compress.recipe import load
from compress.run.plan import make_plan
from runtime import formats
from runtime.errors import ArtifactError, RequestError
from runtime.formats.input_transform import InputOrder, InputTransform, matrices, multiplied
from runtime.formats.presets import preset
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import Scheme
from runtime.kernels.activations import fake_quantize
from runtime.layers.compressed_linear import CompressedLinear

W4A4 = replace(preset("W4A4"), transform=InputTransform("flatquant"))


def random_basis(columns: int, block_size: int | None = None, seed: int = 0) -> Basis:
    transform = InputTransform("random", block_size)
    generator = torch.Generator().manual_seed(seed)
    specs = transform.tensors(columns).items()
    return Basis(transform, {name: torch.randn(spec.shape, generator=generator) for name, spec in specs})


def statistics_of(x: torch.Tensor, directory: Path | None = None, samples: int = 4096) -> Statistics:
    collector = StatisticsCollector(x.shape[1], True, directory=directory, samples=samples)
    for part in x.split(37):
        collector.add(part)
    return collector.finish()


# ---------------------------------------------------------------- the basis
@pytest.mark.parametrize(
    ("columns", "block_size"), [(96, None), (101, None), (88, 8), (1, None), (2, None), (64, 64), (30, 1)]
)
def test_the_product_stays_in_float64(columns: int, block_size: int | None) -> None:
    torch.manual_seed(columns)
    basis = random_basis(columns, block_size)
    left, right = basis.transform.sizes(columns)
    tensors = {name: tensor.double() + 2 * torch.eye(len(tensor)) for name, tensor in basis.tensors.items()}
    x, weight = torch.randn(5, 3, columns).double(), torch.randn(7, columns).double()
    turned = basis.transform.to_weight(weight, tensors)
    torch.testing.assert_close(basis.transform.of_inputs(x, tensors) @ turned.T, x @ weight.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(basis.transform.of_weight(turned, tensors), weight, rtol=1e-9, atol=1e-9)
    # as one matrix, by its definition
    own = torch.kron(tensors.get("input_left", torch.eye(1).double()), tensors["input_right"])
    whole = torch.block_diag(*[own] * (columns // (left * right)))
    torch.testing.assert_close(basis.transform.of_inputs(x, tensors), x @ whole)


def test_sizes_are_as_square_as_can_be() -> None:
    assert [InputTransform("", None).sizes(n) for n in (5632, 11008, 2048, 7, 1)] == [
        (64, 88),
        (86, 128),
        (32, 64),
        (1, 7),
        (1, 1),
    ]
    assert InputTransform("", 16).sizes(64) == (1, 16)
    assert "multiple of 16 columns, not 40" in str(InputTransform("hadamard_groups", 16).why_not(40))
    assert InputTransform("hadamard").why_not(11008) is None
    assert "11003 columns have no two factors of at most 1024" in str(InputTransform("hadamard").why_not(11003))


@pytest.mark.parametrize(
    "given",
    [
        3,
        {},
        {"name": 1},
        {"name": "a", "block_size": 0},
        {"name": "a", "block_size": True},
        {"name": "a", "block_size": "8"},
        {"name": "a", "block_size": 8, "order": True},
    ],
)
def test_a_config_that_means_nothing_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="input_transform"):
        InputTransform.from_config(given)


@pytest.mark.parametrize("scheme", [W4A4, replace(preset("NVFP4"), transform=InputTransform("x", 16))])
def test_schemes_come_back_from_their_config(scheme: Scheme) -> None:
    assert Scheme.from_config(json.loads(json.dumps(scheme.to_config()))) == scheme


@pytest.mark.parametrize("filed", [False, True])
@pytest.mark.parametrize(("columns", "block_size"), [(96, None), (88, 8), (1030, None)])
def test_statistics_in_a_basis_are_those_of_transformed_inputs(
    tmp_path: Path, columns: int, block_size: int | None, filed: bool
) -> None:
    x = torch.randn(200, columns) * torch.linspace(0.1, 5, columns) + 0.3
    basis = random_basis(columns, block_size)
    found = basis.statistics(statistics_of(x, tmp_path if filed else None))
    assert found is not None
    wanted = statistics_of(basis.transform.of_inputs(x, basis.tensors))
    assert found.hessian is not None
    assert wanted.hessian is not None
    scale = float(wanted.hessian.abs().max())
    torch.testing.assert_close(torch.as_tensor(found.hessian), wanted.hessian, rtol=1e-4, atol=1e-5 * scale)
    for name in ("minimum", "maximum", "abs_mean"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.square_mean, wanted.square_mean, rtol=1e-3, atol=1e-5 * scale)
    assert found.tokens == 200


def test_samples_are_drawn_from_all_inputs() -> None:
    x = torch.arange(20000.0)[:, None].expand(-1, 3)
    found = statistics_of(x, samples=500).samples
    assert found is not None
    assert found.shape == (500, 3)
    assert len(found[:, 0].unique()) == 500
    assert abs(float(found[:, 0].mean()) - 10000) < 1000
    assert statistics_of(x, samples=0).samples is None


def test_processes_keep_the_same_samples_of_all_of_them() -> None:
    """One has seen many inputs, one a few, one none."""
    parts = [
        torch.arange(start, stop, dtype=torch.float32)[:, None].expand(-1, 3)
        for start, stop in ((0, 900), (900, 905), (0, 0))
    ]
    collectors = [StatisticsCollector(3, samples=64) for _ in parts]
    barrier, sent = threading.Barrier(3), [torch.empty(0)] * 3

    def share(rank: int) -> Statistics:
        def reduce(tensor: torch.Tensor, how: str) -> None:
            sent[rank] = tensor.clone()
            barrier.wait()
            every = torch.stack(sent)
            tensor.copy_(every.sum(0) if how == "sum" else every.amin(0) if how == "min" else every.amax(0))
            barrier.wait()

        collectors[rank].add(parts[rank])
        collectors[rank].pool(reduce, rank, 3)
        return collectors[rank].finish()

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(share, range(3)))
    assert all(each.tokens == 905 for each in found)
    first = found[0].samples
    assert first is not None
    assert len(first[:, 0].unique()) == 64
    assert all(each.samples is not None and torch.equal(each.samples, first) for each in found)
    few = [StatisticsCollector(3, samples=64) for _ in range(2)]
    few[0].add(parts[1])
    few[0].pool(lambda *_: None, 0, 1)
    assert torch.equal(few[0].finish().samples, parts[1])  # type: ignore[arg-type]


def test_ranges_of_other_layers_alone_say_nothing_and_no_inputs_have_none() -> None:
    """What was collected for a layer that reads the same input, without a Hessian and without samples."""
    basis = random_basis(12)
    collector = StatisticsCollector(12, hessian=False)
    collector.add(torch.randn(5, 12))
    assert basis.statistics(collector.finish()) is None
    assert bool(basis.statistics(statistics_of(torch.randn(5, 12), samples=0)).maximum.isnan().all())  # type: ignore[union-attr]
    assert bool((basis.statistics(StatisticsCollector(12, samples=8).finish()).maximum == 0).all())  # type: ignore[union-attr]


# ---------------------------------------------------------------- the methods
def planted(tokens: int, columns: int, seed: int) -> torch.Tensor:
    """Inputs with outliers in some dimensions, and dimensions that go together."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator)
    x[:, 3::17] *= 30
    x[:, 5::11] += 4 * x[:, 4:-1:11][:, : x[:, 5::11].shape[1]]
    return x


def error_of(tensors: dict[str, torch.Tensor], weight: torch.Tensor, x: torch.Tensor) -> float:
    """Relative error of outputs rounded to nearest, straight from the definition."""
    assert W4A4.activations is not None
    left, right = matrices(tensors)
    whole = right if left is None else torch.kron(left, right)
    turned, inputs = weight @ torch.linalg.inv(whole).T, x @ whole
    scale = turned.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True) / 7.5
    rounded = (turned.unflatten(1, (-1, 16)) / scale).round().clamp(-8, 7) * scale
    given = fake_quantize(inputs, W4A4.activations, {})
    return float((given @ rounded.flatten(1).T - x @ weight.T).norm() / (x @ weight.T).norm())


def found_by(method: str, weight: torch.Tensor, x: torch.Tensor | None) -> dict[str, torch.Tensor]:
    assert W4A4.grid is not None
    scheme = Scheme(replace(W4A4.grid, group_size=16), W4A4.activations, None, InputTransform(method))
    return METHODS[method].find(Layers([weight[:50], weight[50:]], scheme, x))


def test_outliers_cost_less_rotated_and_least_learned() -> None:
    weight, x = torch.randn(80, 96, generator=torch.Generator().manual_seed(1)), planted(600, 96, 0)
    fresh = planted(300, 96, 9)
    plain = error_of({"input_right": torch.eye(96)}, weight, fresh)
    rotated = error_of(found_by("hadamard", weight, None), weight, fresh)
    learned = error_of(found_by("flatquant", weight, x), weight, fresh)
    assert rotated < 0.8 * plain
    assert learned < 0.85 * rotated


@pytest.mark.parametrize("columns", [96, 101, 86 * 4])
def test_hadamard_matrices_are_orthogonal_and_always_the_same(columns: int) -> None:
    found = found_by("hadamard", torch.randn(60, columns), None)
    for name, matrix in found.items():
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(len(matrix)), atol=1e-5, rtol=0)
        assert why_not(len(matrix)) or bool((matrix.abs() - len(matrix) ** -0.5).abs().max() < 1e-6), (
            "entries of one size"
        )
        assert torch.equal(matrix, found_by("hadamard", torch.randn(60, columns), None)[name])


def test_learning_gives_the_same_matrices_again() -> None:
    weight, x = torch.randn(60, 32), planted(200, 32, 0)
    once, again = (found_by("flatquant", weight, x) for _ in range(2))
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_a_matrix_that_cannot_be_inverted_ends_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(60, 32), planted(200, 32, 0)
    start = found_by("hadamard", weight, None)
    singular = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    monkeypatch.setattr(flatquant.hadamard, "find", lambda _layers: singular)
    found = found_by("flatquant", weight, x)
    assert all(torch.equal(found[name], singular[name]) for name in singular), (
        "it began there, and found nothing better"
    )


@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_learning_that_does_not_help_leaves_hadamard_matrices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Steps far too large, no samples, or one: nothing is stored that is worse on inputs which were held out."""
    monkeypatch.setattr(flatquant, "RATE", 1e6)
    weight = torch.randn(60, 32)
    found, start = (found_by(name, weight, planted(count, 32, 0)) for name in ("flatquant", "hadamard"))
    assert all(torch.equal(found[name], start[name]) for name in start)


# ---------------------------------------------------------------- orders
def test_an_order_changes_no_bit() -> None:
    transform, x, weight = InputOrder("order"), torch.randn(2, 3, 40, dtype=torch.bfloat16), torch.randn(7, 40)
    tensors = {"input_order": torch.randperm(40).int()}
    assert torch.equal(transform.of_weight(transform.to_weight(weight, tensors), tensors), weight)
    order = tensors["input_order"].tolist()
    assert torch.equal(transform.of_inputs(x, tensors), torch.stack([x[..., place] for place in order], -1))
    assert torch.equal(transform.to_weight(weight, tensors), torch.stack([weight[:, place] for place in order], -1))
    assert Scheme.from_config(json.loads(json.dumps(preset("Atom").to_config()))) == preset("Atom")


def test_features_of_8_bits_are_the_largest_and_are_rounded_finer() -> None:
    x, weight = planted(600, 96, 0), torch.randn(80, 96)
    scheme = resolve_scheme(QuantizeConfig(method="rtn", scheme="Atom", group_size=8, int8_channels=8))
    assert scheme.activations is not None
    assert (scheme.activations.group_size, scheme.activations.int8_tail, scheme.activations.bits) == (8, 8, 4)
    found = METHODS["outliers_last"].find(Layers([weight], scheme, x))
    assert set(found["input_order"][-8:].tolist()) >= set(range(3, 96, 17)), "those that are planted"
    assert sorted(found["input_order"].tolist()) == list(range(96))
    turned = InputOrder("outliers_last").of_inputs(x, found)
    given = fake_quantize(turned, scheme.activations, {})
    for part, bits in ((slice(0, 88), 4), (slice(88, 96), 8)):
        own = turned[:, part].unflatten(1, (-1, 8))
        step = own.abs().amax(-1, keepdim=True) / (2**bits - 1) * 2
        wanted = (own / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step
        torch.testing.assert_close(given[:, part], wanted.flatten(1))
    as_it_was = fake_quantize(x, replace(scheme.activations, int8_tail=0), {})
    assert float((given - turned).norm()) < 0.3 * float((as_it_was - x).norm())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheme": "W4A8", "int8_channels": 32}, "dynamic integer activations of fewer than 8 bits"),
        ({"scheme": "W4A16", "int8_channels": 32}, "dynamic integer activations of fewer than 8 bits"),
        ({"scheme": "W4A4", "activation_mode": "static", "int8_channels": 32}, "dynamic integer activations"),
        ({"scheme": "W4A4", "group_size": "channel", "int8_channels": 32}, "give a group_size"),
        ({"scheme": "Atom", "activations": "int8"}, "int8_channels 128: wants dynamic integer activations"),
        ({"scheme": "Atom", "activation_mode": "static"}, "int8_channels 128: wants dynamic integer activations"),
        ({"scheme": "Atom", "bits": 3.5}, "int8_channels 128: a budget measures layers"),
        ({"scheme": "NVFP4", "int8_channels": 32}, "leave activations, activation_mode, int8_channels out"),
        ({"scheme": {"representation": "trellis"}, "int8_channels": 32}, "weights on a grid with groups"),
        ({"scheme": "Atom", "input_transform": "hadamard"}, "already reorders the inputs"),
    ],
)
def test_features_of_8_bits_that_mean_nothing_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        resolve_scheme(QuantizeConfig(method="rtn", **given))


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (48, "an int8_tail of 48 features is not whole groups of 32"),
        (96, "inputs of 96 features cannot have 96 of 8 bits"),
        (128, "inputs of 96 features cannot have 128 of 8 bits"),
    ],
)
def test_features_of_8_bits_are_whole_groups_and_not_all(tail: int, said: str) -> None:
    scheme = resolve_scheme(QuantizeConfig(method="rtn", scheme="Atom", group_size=32, int8_channels=tail))
    with pytest.raises(RequestError, match=said):
        check_fits(scheme, (16, 96))


def test_a_preset_keeps_its_features_of_8_bits_beside_other_fields() -> None:
    again = resolve_scheme(QuantizeConfig(method="rtn", scheme="Atom", activations="int4"))
    assert again == preset("Atom")


@pytest.mark.parametrize("wrong", [torch.zeros(128).int(), torch.arange(1, 129).int(), torch.arange(128).int() - 1])
def test_a_damaged_order_is_named(wrong: torch.Tensor) -> None:
    scheme = replace(preset("W4A16"), transform=InputOrder("outliers_last"))
    order = {"input_order": torch.randperm(128).int()}
    tensors = formats.choose(scheme, (16, 128)).pack(random_weight(scheme, (16, 128)), **order)
    entry = ModuleEntry(scheme, "pack-quantized")
    CompressedLinear.from_tensors(entry, (16, 128), tensors, None, torch.float32).prepare()
    damaged = CompressedLinear.from_tensors(entry, (16, 128), tensors | {"input_order": wrong}, None, torch.float32)
    with pytest.raises(ArtifactError, match="tensor input_order is not a permutation of the features"):
        damaged.prepare()


# ---------------------------------------------------------------- in a recipe
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "W4A16": {"scheme": "W4A16", "group_size": 32, "input_transform": "hadamard"},
    "W4A4": {"scheme": "W4A4", "group_size": 32, "input_transform": "hadamard"},
    "W4A4 learned": {"scheme": "W4A4", "group_size": 32, "input_transform": "flatquant"},
    "W8A8 static": {"scheme": "W8A8-INT8", "activation_mode": "static", "input_transform": "hadamard"},
    "NVFP4": {"scheme": "NVFP4", "input_transform": "hadamard_groups"},
    "MXFP4 learned": {"scheme": "MXFP4", "input_transform": "flatquant"},
    "order": {"scheme": "W4A16", "group_size": 32, "input_transform": "outliers_last"},
    "Atom": {"scheme": "Atom", "group_size": 32, "int8_channels": 32},
    "trellis learned": {"scheme": {"representation": "trellis", "group_size": 32}, "input_transform": "flatquant"},
    "trellis": {"scheme": {"representation": "trellis", "group_size": 32}, "input_transform": "hadamard"},
}


@pytest.mark.sampled(5, 6)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_artifact_computes_what_its_layers_stand_for(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, kind: str, method: str
) -> None:
    model = make_checkpoint(**SIZES)
    request = recipe(model, {"quantize": {"method": method, **KINDS[kind]}})
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    manifest = json.loads((made.path / "compress.json").read_text())
    assert KINDS[kind].get("input_transform", "outliers_last") in manifest["layers"][0]["method"]
    assert {reader["name"] for reader in manifest["readable_by"] if reader["how"] == "yes"} == {"this runtime"}
    ids = torch.randint(3, 250, (2, 24))
    reference = runtime.load(made.path, kernels="reference", device="cpu", dtype="float32")
    layers = [each for each in reference.engine.module.modules() if isinstance(each, CompressedLinear)]
    assert len(layers) == 14
    for layer in layers[:7]:  # a product, straight from the definition
        x = torch.randn(9, layer.in_features)
        tensors, scheme = layer.stored(), layer.entry.scheme
        turned = x[:, tensors["input_order"].long()] if "input_order" in tensors else multiplied(x, *matrices(tensors))
        given = turned if scheme.activations is None else fake_quantize(turned, scheme.activations, tensors)
        wanted = given @ layer.compressed_weight().dequantize().T
        torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)
        chosen = CompressedLinear.from_tensors(layer.entry, layer.shape, tensors, None, torch.float32)
        assert chosen.prepare().decode.name != "reference"
        torch.testing.assert_close(chosen(x), wanted, rtol=1e-4, atol=1e-4)
        own = x @ layer.dequantize().T
        near = (layer(x) - own).norm() / own.norm()
        assert near < (1e-5 if scheme.activations is None else 0.5)
    native = runtime.load(made.path, device="cpu", dtype="float32")
    wanted, found = (each.engine.logits(ids) for each in (reference, native))
    rows = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    if scheme.activations is None:
        assert float(rows.max()) < 1e-4
    else:  # an input on the boundary of two codes may become either, and what follows with it
        # The extreme of integers that share a scale is worth 7.5 steps: of every group one lies on a boundary.
        assert float(rows.min()) < 1e-5 or scheme.activations.int8_tail
        assert float(rows.median()) < (0.5 if scheme.activations.bits == 4 else 0.05)


def test_transformers_runs_it_with_this_package(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    request = recipe(make_checkpoint(**SIZES), {"quantize": {"method": "rtn", **KINDS["W4A16"]}})
    path = compress.apply(request, output=tmp_path / "out", quiet=True).path
    ids = torch.randint(3, 250, (1, 24))
    wanted = runtime.load(path, kernels="reference", device="cpu", dtype="float32").engine.logits(ids)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.testing.assert_close(theirs(ids).logits, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("quality", [{"objective": "propagated"}, {"quality": "best"}])
def test_objectives_beyond_the_layer_go_with_it(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, quality: dict[str, Any]
) -> None:
    stage = {"quantize": {"method": "gptq", **KINDS["W4A4"], **quality}}
    request = recipe(
        make_checkpoint(**SIZES), stage, calibration={"data": "bundled", "samples": 16, "sequence_length": 64}
    )
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    layers = json.loads((made.path / "compress.json").read_text())["layers"]
    assert all(layer["error"] < 0.3 for layer in layers)
    assert any("propagated" in layer["notes"] for layer in layers)


def test_experts_have_it_too(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    model = make_checkpoint("mixtral", num_local_experts=4)
    stage = {"quantize": {"method": "gptq", "bits": 4, "group_size": 16, "input_transform": "hadamard"}}
    made = compress.apply(recipe(model, stage), output=tmp_path / "out", quiet=True)
    ids = torch.randint(3, 250, (2, 24))
    wanted, found = (runtime.load(made.path, kernels=k, device="cpu", dtype="float32") for k in ("reference", "auto"))
    assert "transforms its input, which C does not do for experts" in found.explain()["model"]
    torch.testing.assert_close(found.engine.logits(ids), wanted.engine.logits(ids), rtol=1e-3, atol=1e-4)


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "unknown": ([{"quantize": {"method": "rtn", "input_transform": "hadamrd"}}], "did you mean 'hadamard'"),
    "no groups": ([{"quantize": {"method": "rtn", "scheme": "W8A8-INT8", "input_transform": "hadamard_groups"}}], "give hadamard"),
    "lossless": ([{"quantize": {"method": "rtn", "scheme": "DF11", "input_transform": "hadamard"}}], "without loss"),
    "pruned": (
        [
            {"prune": {"method": "magnitude", "sparsity": 0.5}},
            {"quantize": {"method": "rtn", "bits": 4, "group_size": 32, "input_transform": "hadamard"}},
        ],
        "leave the stage that prunes out",
    ),
    "budget": ([{"quantize": {"method": "gptq", "bits": 3.5, "group_size": 32, "input_transform": "hadamard"}}], "give whole bits"),
    "scales": ([{"quantize": {"method": "awq", "group_size": 32, "input_transform": "hadamard"}}], "give gptq or rtn"),
    "recovery": (
        [
            {"quantize": {"method": "rtn", "bits": 4, "group_size": 32, "input_transform": "hadamard"}},
            {"recover": {"method": "finetune", "steps": 1}},
        ],
        "in the basis of input_transform hadamard",
    ),
    "table": (
        [{"quantize": {"method": "rtn", "bits": 8, "group_size": 32, "targets": ["Embedding"], "input_transform": "hadamard"}}],
        "is an embedding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_with_it_is_refused_before_anything_is_made(
    make_checkpoint: Any, recipe: Any, what: str
) -> None:
    stages, said = REFUSED[what]
    with pytest.raises(RequestError, match=said):
        make_plan(load(recipe(make_checkpoint(**SIZES), *stages)))


def test_a_damaged_matrix_is_named() -> None:
    scheme = replace(preset("W4A16"), transform=InputTransform("hadamard"))
    tensors = formats.choose(scheme, (16, 128)).pack(random_weight(scheme, (16, 128)), **random_basis(128).tensors)
    entry = ModuleEntry(scheme, "pack-quantized")
    CompressedLinear.from_tensors(entry, (16, 128), tensors, None, torch.float32)
    for name, wrong in (("input_left", torch.eye(16)), ("input_right", torch.eye(16, dtype=torch.int32))):
        with pytest.raises(ArtifactError, match=f"tensor {name} "):
            CompressedLinear.from_tensors(entry, (16, 128), tensors | {name: wrong}, None, torch.float32)
    damaged = CompressedLinear.from_tensors(entry, (16, 128), tensors, None, torch.float32)
    damaged._buffers["input_right"] = torch.full_like(tensors["input_right"], torch.nan)
    with pytest.raises(ArtifactError, match="tensor input_right holds NaN or Inf"):
        damaged.prepare()
    del tensors["input_left"]
    with pytest.raises(ArtifactError, match="tensor input_left is missing"):
        CompressedLinear.from_tensors(entry, (16, 128), tensors, None, torch.float32)
