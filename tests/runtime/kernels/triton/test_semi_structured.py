"""2:4 products through torch's semi-structured tensors: offered only where they fit and compute rightly. (They need a GPU to run.)"""

import logging

import pytest
import torch

from runtime.kernels.triton import semi_structured

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget():
    clear = semi_structured.works.cache_clear
    clear()
    yield
    clear()


def test_works_where_the_product_is_right(monkeypatch):
    monkeypatch.setattr(semi_structured, "linear", torch.nn.functional.linear)
    assert semi_structured.works(torch.bfloat16, CPU)
    assert semi_structured.works(torch.float16, CPU)


def test_not_where_torch_has_none(caplog):
    with caplog.at_level(logging.INFO, logger="compress.kernels"):
        assert not semi_structured.works(torch.bfloat16, CPU)  # torch's own refusal: not a CUDA tensor
    assert "do not run on cpu" in caplog.text


@pytest.mark.parametrize(
    "wrong", [torch.zeros_like, lambda y: y * 1.05, lambda y: y * torch.nan], ids=["zero", "off", "nan"]
)
def test_not_where_the_product_is_wrong(wrong, monkeypatch, caplog):
    monkeypatch.setattr(
        semi_structured, "linear", lambda x, w, bias=None: wrong(torch.nn.functional.linear(x, w, bias))
    )
    assert not semi_structured.works(torch.bfloat16, CPU)
    assert "are wrong on cpu" in caplog.text


def test_worth_timing_only_for_many_rows_of_whole_blocks(machine, monkeypatch):
    monkeypatch.setattr(semi_structured, "works", lambda dtype, device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gpu = torch.device("cuda", 0)
    # Rows of one class share a choice, so all of them are offered the same.
    offered = [semi_structured.worth_timing(rows, (64, 128), torch.bfloat16, gpu) for rows in (129, 256, 257, 512)]
    assert offered == [False, False, True, True]
    for shape, device in (((48, 128), gpu), ((64, 96), gpu), ((64, 128), CPU)):
        assert not semi_structured.worth_timing(512, shape, torch.bfloat16, device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not semi_structured.worth_timing(512, (64, 128), torch.bfloat16, gpu)


def test_rows_far_apart_are_made_contiguous(monkeypatch):
    given = []
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, bias: given.append(x) or x)
    semi_structured.linear(torch.randn(8, 64)[:, :32], torch.randn(4, 32))
    semi_structured.linear(torch.randn(1, 32).expand(8, 32), torch.randn(4, 32))
    assert [x.stride() for x in given] == [(32, 1), (32, 1)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_product_on_a_gpu():
    weight = torch.randn(96, 64, 4, device="cuda", dtype=torch.bfloat16)
    weight = (weight * (weight.abs().argsort(-1).argsort(-1) >= 2)).flatten(1)
    bias = torch.randn(96, device="cuda").bfloat16()
    for rows in (300, 512):
        x = torch.randn(rows, 400, device="cuda").bfloat16()[:, :256]
        expected = x.double() @ weight.double().t() + bias.double()
        assert (semi_structured.linear(x, weight, bias) - expected).abs().max() < 0.02 * expected.abs().max()
