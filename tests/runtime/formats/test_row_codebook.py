"""Row codebooks: levels that are the best there are, outliers at full precision, tensors on disk, and options that mean nothing."""

import itertools
from dataclasses import replace

import pytest
import torch
from weight_cases import hostile_weights

from compress.core.method import Problem
from compress.core.statistics import StatisticsCollector
from compress.quantize import METHODS
from compress.quantize.presets import resolve_scheme
from compress.weights.solver.group import solve_group
from runtime import formats
from runtime.errors import ArtifactError, RequestError
from runtime.formats import row_codebook
from runtime.formats.presets import PRESETS
from runtime.formats.row_codebook import RowCodebook, best_levels, columns_of, stored_columns
from runtime.formats.scheme import CompressedWeight, Scheme

FORMS = [
    RowCodebook(2), RowCodebook(3), RowCodebook(4), RowCodebook(2, 16), RowCodebook(4, 32), RowCodebook(3, None, 0.02),
    RowCodebook(2, 32, 0.05),
]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cost(levels: torch.Tensor, points: torch.Tensor, mass: torch.Tensor) -> float:
    return float((mass * (points[:, None] - levels).square().amin(1)).sum())


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("count", "reach", "points"), [(2, 6, 1), (3, 8, 9), (4, 5, 20), (4, 6, 4)])
def test_no_other_levels_are_closer(count, reach, points, native, monkeypatch):
    """Against all choices of so many integers; points beyond the range too, and some that weigh nothing."""
    if not native:
        monkeypatch.setattr(row_codebook, "_library", lambda: None)
    values, mass = 4 * normal(12, points), torch.rand(12, points, generator=torch.Generator().manual_seed(1))
    values[3] = 0
    mass[:, ::5] = 0
    found = best_levels(values, mass, count, reach)
    assert (found.diff(dim=1) > 0).all()
    assert found.abs().max() <= reach
    choices = [torch.tensor(c).float() for c in itertools.combinations(range(-reach, reach + 1), count)]
    for own, row, weigh in zip(found.float(), values, mass, strict=True):
        assert cost(own, row, weigh) <= min(cost(c, row, weigh) for c in choices) + 1e-4


def test_c_and_torch_search_alike(monkeypatch):
    values, mass = 30 * normal(50, 300), torch.rand(50, 300, generator=torch.Generator().manual_seed(1))
    found = [best_levels(values, mass, 16).float()]
    monkeypatch.setattr(row_codebook, "_library", lambda: None)
    found.append(best_levels(values, mass, 16).float())
    for one, other, row, weigh in zip(*found, values, mass, strict=True):  # C may round a product and a sum at once
        assert cost(one, row, weigh) == pytest.approx(cost(other, row, weigh), rel=1e-4)


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_normal_weights_lose_what_lloyd_and_max_found(bits, distortion):
    """Mean squared errors of the best quantizers of a normal distribution (Max, 1960); levels fitted to a sample lose a little less."""
    weight, form = normal(16, 4096), RowCodebook(bits)
    parameters = form.fit(weight, torch.float32)
    lost = (form.dequantize(form.round(weight, parameters), parameters, torch.float32) - weight).square().mean()
    assert 0.95 * distortion < float(lost / weight.square().mean()) < 1.01 * distortion


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_weight_gets_its_nearest_level_or_stays(form, dtype):
    """Column by column and all at once, against all levels of the row; outliers are the weight in the dtype of the model."""
    weight = hostile_weights(9, 96)
    importance = torch.rand(96, generator=torch.Generator().manual_seed(3))
    parameters = form.fit(weight, dtype, importance)
    codes = form.round(weight, parameters)
    columns = weight.T.contiguous()
    found = [form.nearest(columns[j : j + 1], parameters, j) for j in range(96)]
    assert torch.equal(torch.stack([code for _, code in found], 1), codes)
    values = form.dequantize(codes, parameters, torch.float32)
    torch.testing.assert_close(torch.cat([value for value, _ in found]).T, values, rtol=0, atol=0)
    size = form.group_size or 96
    scale = parameters["scale"].float().repeat_interleave(size, 1)
    levels = parameters["levels"].float()[:, None] * scale[..., None]
    least = (weight[..., None] - levels).abs().amin(-1)
    apart = torch.zeros(9, 96, dtype=torch.bool)
    if form.outliers:
        apart.scatter_(1, columns_of(parameters["outlier_columns"]), True)
        assert (apart.sum(1) == form.count(96)).all()
    assert torch.equal(values[apart], weight[apart].to(dtype).float())
    off = (values - weight).abs()[~apart]
    assert (off <= least[~apart] * (1 + 1e-5) + 1e-30).all()


def test_outliers_are_where_levels_lose_most():
    weight = normal(8, 128)
    weight[:, 17] = 40.0
    weight[:, 90] = -35.0
    plain, apart = RowCodebook(3), RowCodebook(3, None, 0.0157)
    parameters = apart.fit(weight, torch.float32, torch.ones(128))
    lost = [
        float((form.dequantize(form.round(weight, own), own, torch.float32) - weight).square().sum())
        for form, own in ((plain, plain.fit(weight, torch.float32)), (apart, parameters))
    ]
    assert lost[1] < 0.8 * lost[0], lost


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_one_large_weight_widens_the_step_unless_it_is_apart(bits):
    """Levels of 8 bits reach as far as the largest weight, of 100 standard deviations here."""
    weight, wide = normal(8, 2048), normal(8, 2048)
    wide[:, 17] = 100.0
    lost = []
    for given, form in (
        (weight, RowCodebook(bits)),
        (wide, RowCodebook(bits)),
        (wide, RowCodebook(bits, None, 0.0005)),
    ):
        parameters = form.fit(given, torch.float32)
        assert form.count(2048) == (form.outliers > 0)
        error = form.dequantize(form.round(given, parameters), parameters, torch.float32) - given
        lost.append(float(error.square().sum()))
    assert lost[1] > 1.3 * lost[0]
    assert lost[2] < 1.01 * lost[0]


def test_numbers_of_columns_have_no_sign():
    places = torch.tensor([[0, 1, 32767, 32768, 65535]])
    assert stored_columns(places).dtype == torch.int16
    assert torch.equal(columns_of(stored_columns(places)), places)
    assert RowCodebook(4, None, 0.01).why_not((8, 65537)) is not None
    assert RowCodebook(4).why_not((8, 65537)) is None


@pytest.mark.parametrize(
    ("form", "zeros"),
    [*((form, 0) for form in FORMS), *((form, zeros) for form in FORMS if form.group_size for zeros in (32, 64))],
    ids=str,
)
def test_refitted_levels_lose_less(form, zeros):
    """Against least squares in float64, of rows with correlated inputs; also where whole groups are zeros, and have no scale."""
    weight, mixed = normal(24, 96), normal(200, 96, seed=2) @ normal(96, 96, seed=3)
    weight[:, :zeros] = 0
    hessian = mixed.T @ mixed / 200
    parameters = form.fit(weight, torch.float32)
    codes = form.round(weight, parameters)

    def lost(codes: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        error = (weight - form.dequantize(codes, parameters, torch.float32)).double()
        return ((error @ hessian.double()) * error).sum(1)

    found = form.refit(weight, codes, parameters, lambda error: error @ hessian, hessian.diagonal())
    assert found is not None
    before, after = lost(codes, parameters), lost(*found)
    assert float(after.sum()) < float(before.sum())
    scale = parameters["scale"].repeat_interleave(96 // parameters["scale"].shape[1], 1).double()
    for row in range(24):
        plain = codes[row] < 2**form.bits
        chosen = torch.nn.functional.one_hot(codes[row].long().clamp(max=2**form.bits - 1), 2**form.bits).double()
        basis = chosen * (scale[row] * plain)[:, None]
        fixed = torch.where(plain, 0.0, form.dequantize(codes, parameters, torch.float64)[row])
        wanted, normal_matrix = weight[row].double() - fixed, basis.T @ hessian.double() @ basis
        best = torch.linalg.pinv(normal_matrix) @ (basis.T @ hessian.double() @ wanted)
        error = wanted - basis @ best
        least = float(error @ hessian.double() @ error)
        assert float(after[row]) <= least + 0.4 * (float(before[row]) - least) + 0.02 * least


def test_a_refit_does_not_depend_on_the_rows_beside():
    """Rows stop one by one; those without an error do so at once."""
    weight, mixed = normal(12, 96), normal(200, 96, seed=2) @ normal(96, 96, seed=3)
    hessian, form = mixed.T @ mixed / 200, RowCodebook(4)
    parameters = form.fit(weight, torch.float32)
    codes = form.round(weight, parameters)
    weight[::3] = form.dequantize(codes, parameters, torch.float32)[::3]

    def refitted(rows: slice) -> torch.Tensor:
        own = form.rows(parameters, rows)
        found = form.refit(weight[rows], codes[rows], own, lambda error: error @ hessian, hessian.diagonal())
        return form.dequantize(*found, torch.float32)

    torch.testing.assert_close(refitted(slice(None)), torch.cat([refitted(slice(r, r + 1)) for r in range(12)]))
    torch.testing.assert_close(refitted(slice(0, 1)), weight[:1], rtol=0.01, atol=0.01)


def test_the_loop_beats_nearest_levels_and_a_grid():
    """Of as many bits: rows of 256 weights, a grid with a scale for 64 of them at 2 bits."""
    collector = StatisticsCollector(256)
    collector.add(normal(600, 256, seed=2) @ normal(256, 256, seed=3))
    statistics = collector.finish()
    weight = normal(48, 256)
    lost = []
    for fields in ({"scheme": {"representation": "row_codebook", "bits": 2}}, {"bits": 2, "group_size": 64}):
        config = METHODS["gptq"].config(method="gptq", **fields)
        solved = solve_group(Problem([weight], statistics, None, config, resolve_scheme(config), torch.float32, ["a"]))[
            0
        ]
        error = weight - solved.weight.dequantize()
        lost.append(float((error @ statistics.hessian * error).sum()))
        assert solved.lost == pytest.approx(lost[-1], rel=2e-3)
    form = RowCodebook(2)
    parameters = form.fit(weight, torch.float32, statistics.hessian.diagonal())
    error = weight - form.dequantize(form.round(weight, parameters), parameters, torch.float32)
    assert lost[0] < lost[1]
    assert lost[0] < 0.6 * float((error @ statistics.hessian * error).sum())


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("outliers", [0.0, 0.03])
def test_small_matrices(shape, outliers):
    scheme, weight = Scheme(RowCodebook(3, None, outliers)), normal(*shape)
    parameters = scheme.weights.fit(weight, torch.bfloat16)
    made = CompressedWeight.of(scheme.weights.round(weight, parameters), parameters, None, scheme, torch.bfloat16)
    tensors = formats.get("row_codebook").pack(made)
    again = formats.get("row_codebook").unpack(tensors, scheme, shape, torch.bfloat16)
    assert torch.equal(again.dequantize(), made.dequantize())
    assert (made.dequantize().float() - weight).abs().sum() <= 0.02 * weight.abs().sum()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight_levels", lambda t: t.flip(1)),
        ("weight_outlier_columns", lambda t: torch.full_like(t, 64)),
        ("weight_outlier_columns", lambda t: torch.full_like(t, -1)),
        ("weight_outlier_columns", lambda t: t.flip(1)),
        ("weight_outlier_columns", lambda t: torch.zeros_like(t)),
    ],
)
def test_tensors_that_contradict_themselves_are_refused(name, change):
    scheme, weight = Scheme(RowCodebook(2, None, 0.05)), normal(4, 64)
    parameters = scheme.weights.fit(weight, torch.bfloat16)
    made = CompressedWeight.of(scheme.weights.round(weight, parameters), parameters, None, scheme, torch.bfloat16)
    tensors = formats.get("row_codebook").pack(made)
    with pytest.raises(ArtifactError, match=name):
        formats.get("row_codebook").unpack(tensors | {name: change(tensors[name])}, scheme, (4, 64), torch.bfloat16)


def test_presets_and_options():
    for bits in (2, 3, 4):
        assert PRESETS[f"W{bits}A16_CODEBOOK"] == Scheme(RowCodebook(bits))
    config = METHODS["gptq"].config(method="gptq", scheme="W4A16_CODEBOOK")
    assert resolve_scheme(config) == Scheme(RowCodebook(4))
    again = RowCodebook(3, 64, 0.0045)
    assert Scheme.from_config(Scheme(again).to_config()) == Scheme(again)
    assert replace(again, outliers=0.0).describe() == "codebook 3 bits g64"


@pytest.mark.parametrize(
    "fields",
    [{"bits": 5}, {"bits": 1}, {"group_size": 24}, {"group_size": 0}, {"outliers": -0.1}, {"outliers": 0.2}, {"levels": 3},
     {"outliers": float("nan")}, {"bits": "4"}],
    ids=str,
)  # fmt: skip
def test_options_that_mean_nothing(fields):
    config = METHODS["gptq"].config(method="gptq", scheme={"representation": "row_codebook", **fields})
    with pytest.raises(RequestError, match=next(iter(fields))):
        resolve_scheme(config)
