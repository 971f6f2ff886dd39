"""Experts and routers in C against plain torch: every kind of weight, hostile choices, and the same bits however the work is cut."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import products
import pytest
import torch
from weight_cases import int_scheme, random_weight

from runtime import formats
from runtime.formats.block_float import BlockFloat
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme
from runtime.kernels.cpu import experts as c_experts
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedLinear

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
KINDS = {
    "w4": int_scheme(4, True, 32),
    "w8": int_scheme(8, False, 16),
    "s24": int_scheme(4, True, 32, "2:4"),
    **products.FLOATS,
    **{kind: products.K_QUANTS[kind] for kind in ("Q2_K", "Q4_K", "IQ4_NL")},
    "dense": None,
}


@dataclass
class Layer:
    """Experts in C, and their weights `[out, in]` in float64 with their biases."""

    experts: c_experts.Experts
    weights: list[dict[str, torch.Tensor]]
    keep: list[object] = field(default_factory=list)

    def expected(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for row, (own, shares) in enumerate(zip(index.tolist(), weights.double(), strict=True)):
            for expert, share in zip(own, shares, strict=True):
                if not 0 <= expert < len(self.weights):
                    continue
                w = self.weights[expert]
                up = w["up"] @ x[row].double() + w["up bias"]
                gate = w["gate"] @ x[row].double() + w["gate bias"]
                inner = self.gate(gate, up)
                out[row] += share * (w["down"] @ inner + w["down bias"])
        return out

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        made = self.experts
        if made.activation == c_experts.GATES["none"]:
            return torch.nn.functional.silu(up)
        if made.activation == c_experts.GATES["silu"]:
            return torch.nn.functional.silu(gate) * up
        gate, up = gate.clamp(max=made.limit), up.clamp(-made.limit, made.limit)
        return (up + 1) * gate * torch.sigmoid(gate * made.alpha)


def layer(
    kind: str,
    count: int = 5,
    hidden: int = 96,
    inner: int = 64,
    gate: str = "silu",
    bias: bool = False,
    digits: int = 3,
) -> Layer:
    generator = torch.Generator().manual_seed(count)
    hidden, inner = (512, 256) if kind in ("Q2_K", "Q4_K") else (hidden, inner)
    linear, weights, keep = [], [], []
    for number in range(count):
        own, held = {}, {}
        for place, (name, shape) in enumerate(
            (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner)))
        ):
            offset = torch.randn(shape[0], generator=generator) * bias
            scheme = KINDS[kind]
            if scheme is None:
                value = torch.randn(shape, generator=generator) / 8
                own[name] = products.dense(value, offset)
                keep.append(value)
            else:
                storage = {"s24": "sparse24", "w4": "packed", "w8": "packed"}.get(kind)
                layout = kind if storage else "e2m1" if kind in products.FLOATS else "k"
                made = products.case(layout, scheme, shape, torch.float32, 3 * number + place, storage)
                value = made.weight.dequantize()
                own[name] = products.in_digits(made, digits, offset)
                keep.append(made)
            held |= {name: value.double(), f"{name} bias": offset.double()}
            keep.append(offset)
        linear.append((None if gate == "none" else own["gate"], own["up"], own["down"]))
        weights.append(held)
    experts = c_experts.experts_of(linear, gate, 1.702, 2.5)
    assert not isinstance(experts, str)
    return Layer(experts, weights, keep)


def choice(rows: int, chosen: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    index = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(rows)])
    return index, torch.rand(rows, chosen, generator=generator)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found.double() - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gate", "bias"), [("silu", False), ("clamped", True), ("none", True)])
def test_experts_give_what_torch_gives(kind: str, gate: str, bias: bool) -> None:
    made = layer(kind, gate=gate, bias=bias)
    for rows, chosen in ((1, 2), (7, 3), (40, 2)):
        x, (index, weights) = torch.randn(rows, made.experts.hidden), choice(rows, chosen, 5)
        close(c_experts.run(made.experts, x, index, weights), made.expected(x, index, weights))


@pytest.mark.parametrize(
    ("rows", "chosen", "count"), [(1, 1, 1), (3, 1, 1), (1, 6, 6), (9, 6, 6), (2, 1, 40), (0, 2, 4), (4, 0, 4)]
)
@pytest.mark.parametrize("kind", ["w4", "dense"])
def test_hostile_numbers_of_experts(kind: str, rows: int, chosen: int, count: int) -> None:
    made = layer(kind, count, 71 if kind == "dense" else 96, 33 if kind == "dense" else 32)
    x, (index, weights) = (
        torch.randn(rows, made.experts.hidden),
        choice(rows, chosen, count)
        if rows
        else (
            torch.zeros(0, chosen, dtype=torch.int64),
            torch.zeros(0, chosen),
        ),
    )
    close(c_experts.run(made.experts, x, index, weights), made.expected(x, index, weights))


@pytest.mark.parametrize("kind", ["w4", "dense"])
def test_numbers_that_are_no_experts_are_left_out_and_repeated_ones_count_twice(kind: str) -> None:
    made = layer(kind)
    for index in ([[5, 1]], [[-1, 2**40]], [[3, 3]], [[0, 0], [9, 0]]):
        x, chosen = torch.randn(len(index), 96), torch.tensor(index)
        weights = torch.rand(chosen.shape)
        close(c_experts.run(made.experts, x, chosen, weights), made.expected(x, chosen, weights))


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_neighbours_or_threads(kind: str) -> None:
    made = layer(kind, 8, 160, 128)
    x, (index, weights) = torch.randn(37, made.experts.hidden), choice(37, 3, 8)
    alone = torch.cat(
        [c_experts.run(made.experts, x[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(37)]
    )
    native = library.load()
    assert native is not None
    memory = torch.empty(native.experts_memory(ctypes.byref(made.experts), 37, 3) + 64, dtype=torch.uint8)
    at = -(-memory.data_ptr() // 64) * 64
    for threads in (1, 2, 3, 7):
        y = torch.empty_like(x)
        operands = (index.data_ptr(), weights.data_ptr(), y.data_ptr(), 0, at, threads)
        native.experts_run(ctypes.byref(made.experts), x.data_ptr(), 0, 37, 3, *operands)
        assert torch.equal(y, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_rows_are_rounded_once(dtype: torch.dtype) -> None:
    made = layer("w4", digits=2)
    x, (index, weights) = torch.randn(11, 96).to(dtype), choice(11, 2, 5)
    found, expected = c_experts.run(made.experts, x, index, weights), made.expected(x, index, weights)
    assert found.dtype == dtype
    assert float((found.double() - expected).norm()) <= products.UNIT[dtype] * float(expected.norm()) + 1e-3


def test_a_nan_stays_with_its_token() -> None:
    for kind in ("w4", "dense"):
        made = layer(kind)
        x, (index, weights) = torch.randn(6, made.experts.hidden), choice(6, 2, 5)
        x[2, 5], weights[4, 0] = float("nan"), float("nan")
        found = c_experts.run(made.experts, x, index, weights)
        assert found.isnan().all(1).tolist() == [False, False, True, False, True, False]
        assert not found[[0, 1, 3, 5]].isnan().any()


def test_experts_of_different_shapes_or_groups_are_a_reason() -> None:
    one, other = (products.case("w4", int_scheme(4, True, g), (64, 96), torch.float32) for g in (32, 48))
    back = products.case("w4", int_scheme(4, True, 32), (96, 64), torch.float32)
    first, second, down = (each.layout.linear(each.prepared, each.layer, None) for each in (one, other, back))
    assert "groups" in str(c_experts.experts_of([(first, second, down)], "silu"))
    assert "gate" in str(c_experts.experts_of([(first, first, down), (None, first, down)], "silu"))
    assert "widths" in str(c_experts.experts_of([(first, down, down)], "silu"))
    assert "give back" in str(c_experts.experts_of([(first, first, first)], "silu"))


# ---------------------------------------------------------------- routers


def router(weight: torch.Tensor, correction: torch.Tensor | None = None, **options: float | str) -> c_experts.Router:
    given = {"groups": 1, "best": 1, "normalize": 0, "epsilon": 0.0, "scale": 1.0} | options
    score = c_experts.SCORES[str(given.pop("score"))]
    made = c_experts.Router(logits=products.dense(weight), score=score, **given)
    made.correction = None if correction is None else correction.data_ptr()
    return made


def sorted_by_expert(index: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = index.argsort(1)
    return index.gather(1, order), weights.gather(1, order)


@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (8, 2), (32, 4), (7, 7), (130, 8)])
@pytest.mark.parametrize("score", ["softmax", "chosen"])
def test_softmax_routers(experts: int, chosen: int, score: str) -> None:
    weight, x = torch.randn(experts, 48), torch.randn(29, 48)
    logits = x @ weight.T
    if score == "softmax":
        value, index = logits.softmax(-1).topk(chosen)
    else:
        value, index = logits.topk(chosen)
        value = value.softmax(-1)
    found = sorted_by_expert(*c_experts.route(router(weight, score=score, chosen=chosen), x))
    expected = sorted_by_expert(index, value)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "best", "chosen"), [(1, 1, 4), (4, 2, 4), (8, 4, 3), (4, 1, 2), (2, 2, 9), (16, 3, 2)]
)
def test_sigmoid_routers_with_groups(groups: int, best: int, chosen: int) -> None:
    weight, x, correction = torch.randn(16, 48), torch.randn(33, 48), torch.randn(16) / 4
    scores = (x @ weight.T).sigmoid()
    size = 16 // groups
    by_group = (scores + correction).view(33, groups, size)
    kept = by_group.topk(min(2, size), -1)[0].sum(-1).topk(best, -1)[1]
    masked = by_group.masked_fill(torch.ones(33, groups).scatter(1, kept, 0).bool()[..., None], -torch.inf).view(33, 16)
    index = masked.topk(chosen, -1)[1]
    value = scores.gather(1, index)
    value = value / (value.sum(-1, keepdim=True) + 1e-20) * 2.5
    made = router(
        weight,
        correction,
        score="sigmoid",
        chosen=chosen,
        groups=groups,
        best=best,
        normalize=1,
        epsilon=1e-20,
        scale=2.5,
    )
    found, expected = sorted_by_expert(*c_experts.route(made, x)), sorted_by_expert(index, value)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    weight = torch.ones(6, 4)
    index, weights = c_experts.route(router(weight, score="chosen", chosen=3), torch.ones(2, 4))
    assert index.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("score", ["softmax", "chosen", "sigmoid"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_as_in_torch(score: str, value: float) -> None:
    """An expert of such a logit is chosen, as torch.topk does; the token's weights are NaN where torch's are, others' as before."""
    weight, x = torch.eye(6), torch.rand(5, 6) + 0.1
    x[3, 2] = value
    logits, clean = x, x.clone()
    clean[3, 2] = 0  # it comes in through the bias: times zero it would be NaN for all experts
    bias = torch.zeros(6)
    for row in (0, 3):
        bias[2] = value if row == 3 else 0
        made = router(weight, score=score, chosen=2)
        made.logits = products.dense(weight, bias)
        index, weights = c_experts.route(made, clean[row : row + 1])
        own = logits[row : row + 1]
        if score == "chosen":
            best, expected_index = own.topk(2)
            expected = best.softmax(-1)
        else:
            expected, expected_index = (own.softmax(-1) if score == "softmax" else own.sigmoid()).topk(2)
        (index, weights), (expected_index, expected) = (
            sorted_by_expert(*each) for each in ((index, weights), (expected_index, expected))
        )
        assert torch.equal(weights.isnan().any(1), expected.isnan().any(1))
        if not expected.isnan().all():
            assert torch.equal(index, expected_index)
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert 0 <= int(index.min()) <= int(index.max()) < 6


MX8 = ActivationScheme(8, "float", strategy="group", group_size=32, scales="e8m0")
STATIC = ActivationScheme(8, "float", dynamic=False, strategy="tensor")
LOCAL = ActivationScheme(4, "float", dynamic="local", strategy="tensor_group", group_size=16, scales="e4m3")
FP8, W4 = GridScheme(8, "float", True, "channel"), GridScheme(4, "int", True, "group", 32)
#: Of experts that round their inputs, by turns; calibrated numbers are each expert's own.
ROUNDED = {
    "integers beside blocks": (Scheme(W4, MX8), Scheme(BlockFloat(8), MX8)),
    "static": (Scheme(FP8, STATIC),),
    "static integers": (Scheme(W4, STATIC),),
    "nvfp4": (Scheme(BlockFloat(4, group_size=16, scales="e4m3"), LOCAL),),
    "outliers": (Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme(outliers=1.5)),),
}


def rounded(kind: str, hidden: int, inner: int) -> tuple[c_experts.Experts, list[list[CompressedLinear]], list[object]]:
    """Six experts in C, and their layers: gate, up, down."""
    layers: list[list[CompressedLinear]] = []
    linear, keep = [], []
    for number in range(6):
        scheme, own = ROUNDED[kind][number % len(ROUNDED[kind])], []
        for place, shape in enumerate(((inner, hidden), (inner, hidden), (hidden, inner))):
            storage = formats.choose(scheme, shape)
            tensors = dict(storage.pack(random_weight(scheme, shape, torch.float32, 3 * number + place)))
            for name, spec in scheme.activations.tensors(torch.float32).items():
                value = 0.02 * 1.3**number if name == "input_scale" else 40.0 * 2**number
                tensors[name] = torch.full(spec.shape, value)
            made = CompressedLinear.from_tensors(ModuleEntry(scheme, storage.name), shape, tensors, None, torch.float32)
            made.prepare()
            own.append(made)
        held = [each._tensors() for each in own]
        keep.append(held)
        linear.append(tuple(each.kernel.linear(x, each.layer, None) for each, x in zip(own, held, strict=True)))
        layers.append(own)
    experts = c_experts.experts_of(linear, "silu")
    assert not isinstance(experts, str), experts
    return experts, layers, keep


@pytest.mark.parametrize("kind", ROUNDED)
def test_experts_that_round_their_inputs(kind: str) -> None:
    experts, layers, keep = rounded(kind, 96, 64)
    for rows, chosen in ((1, 3), (1, 6), (9, 2), (40, 3)):
        x, (index, weights) = torch.randn(rows, 96), choice(rows, chosen, 6)
        expected = torch.zeros(rows, 96)
        for number, (gate, up, down) in enumerate(layers):
            share = (weights * (index == number)).sum(1, keepdim=True)
            expected += share * down(torch.nn.functional.silu(gate(x)) * up(x))
        found = c_experts.run(experts, x, index, weights)
        each = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(each.median()) < 1e-5  # in other rows a value at a rounding boundary got another code
        assert float(each.max()) < 0.05
    assert keep


@pytest.mark.parametrize("kind", ROUNDED)
def test_bits_of_experts_that_round_their_inputs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, _, keep = rounded(kind, 64, 4096)
    x, (index, weights) = torch.randn(5, 64), choice(5, 4, 6)
    alone = torch.cat([c_experts.run(experts, x[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(5)])
    for threads in (1, 2, 3, 7) * 5:
        monkeypatch.setattr(c_experts, "threads_for", lambda count, threads=threads: threads)
        assert torch.equal(c_experts.run(experts, x, index, weights), alone), threads
    assert keep


def test_experts_whose_rounding_cannot_be_computed_together() -> None:
    _, layers, _ = rounded("static", 96, 64)
    _, others, _ = rounded("integers beside blocks", 96, 64)

    def linear(own: list[CompressedLinear]) -> list[library.Linear]:
        return [each.kernel.linear(each._tensors(), each.layer, None) for each in own]

    gate, up, down = linear(layers[0])
    other, _, _ = linear(layers[1])
    assert "different scales" in str(c_experts.experts_of([(other, up, down)], "silu"))
    assert "different ways" in str(c_experts.experts_of([(gate, up, down), tuple(linear(others[1]))], "silu"))
