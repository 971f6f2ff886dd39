"""CompressedLinear, CompressedEmbedding and their installation in a model."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from weight_cases import int_scheme, random_weight

from runtime import formats, kernels
from runtime.errors import ArtifactError, RequestError
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme
from runtime.layers.compressed_linear import CompressedEmbedding, CompressedLinear, install, prepare_all

STATIC = Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme(8, "int", True, False, "tensor"))
SCHEMES = [
    int_scheme(4, False, 32),
    int_scheme(4, True, "channel", "2:4"),
    int_scheme(3, False, 32, "unstructured"),
    int_scheme(8, True, 64),
    Scheme(GridScheme(8, "float", True, "channel")),
    Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme()),
    Scheme(None, None, "2:4"),
    Scheme(None, None, "unstructured"),
]


def packed(scheme, shape, dtype=torch.bfloat16, seed=0):
    weight = random_weight(scheme, shape, dtype, seed)
    storage = formats.choose(scheme, shape)
    tensors = storage.pack(weight)
    return ModuleEntry(scheme, storage.name, storage.stored_count(tensors)), tensors, weight


def linear(scheme, shape=(48, 128), dtype=torch.bfloat16, bias=True, seed=0):
    entry, tensors, weight = packed(scheme, shape, dtype, seed)
    offset = torch.randn(shape[0]).to(dtype) if bias else None
    return CompressedLinear.from_tensors(entry, shape, tensors, offset, dtype), weight


@pytest.mark.parametrize("wanted", ["reference", "auto", "fast"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_state_dict_is_what_is_on_disk_whatever_the_kernel(scheme, wanted):
    layer, weight = linear(scheme)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.prepare(wanted)
    after = layer.state_dict()
    assert set(after) == set(before)
    for key, value in before.items():
        assert torch.equal(after[key].view(torch.uint8), value.view(torch.uint8)), key
    fresh = CompressedLinear(layer.entry, layer.shape, True, torch.bfloat16, "cpu")
    fresh.load_state_dict(after)
    assert torch.equal(fresh.dequantize(), weight.dequantize())
    # and into a module that a kernel has prepared already
    other, _ = linear(scheme, seed=0)
    other.prepare(wanted)
    other.load_state_dict(before)
    assert torch.equal(other.dequantize(), weight.dequantize())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_cast_changes_the_arithmetic_and_not_the_weight(scheme):
    layer, weight = linear(scheme)
    layer.prepare()
    stored = {k: v.dtype for k, v in layer.stored().items()}
    layer.float()
    assert {k: v.dtype for k, v in layer.stored().items()} == stored
    assert layer.dequantize().dtype == torch.float32
    # a wider type keeps the products of codes and scales that bfloat16 would round
    assert torch.equal(layer.dequantize(), replace(weight, dtype=torch.float32).dequantize())
    assert layer(torch.randn(2, 128)).dtype == torch.float32
    layer.to(torch.bfloat16)
    assert layer(torch.randn(2, 128).to(torch.bfloat16)).dtype == torch.bfloat16
    assert torch.equal(layer.dequantize(), weight.dequantize())


def test_a_move_keeps_the_kernel_that_was_asked_for():
    layer, _ = linear(SCHEMES[0])
    layer.prepare("reference")
    layer.to("cpu")
    assert layer.kernel_name == "reference"
    layer.prepare("int4-cpu")
    layer.float()
    assert layer.kernel_name != "int4-cpu"  # which computes in bfloat16 only
    assert layer.dequantize().dtype == torch.float32


@pytest.mark.parametrize("use", ["dequantize", "forward", "prepare"])
def test_corrupt_positions_are_found_before_they_are_used(use):
    layer, _ = linear(int_scheme(4, True, 32, "2:4"))
    layer.weight_metadata[0, 0] = 0
    calls = {"dequantize": layer.dequantize, "forward": lambda: layer(torch.zeros(1, 128)), "prepare": layer.prepare}
    with pytest.raises(ArtifactError, match="weight_metadata"):
        calls[use]()


def test_copies_are_independent():
    layer, weight = linear(SCHEMES[0])
    layer.prepare()
    twin = copy.deepcopy(layer)
    for buffer in layer.buffers():
        buffer.zero_()
    assert torch.equal(twin.dequantize(), weight.dequantize())
    x = torch.randn(1, 128).to(torch.bfloat16)
    assert not torch.equal(twin(x), layer(x))


def test_meta_layers_have_the_tensors_of_the_format():
    for scheme in SCHEMES:
        entry, tensors, _ = packed(scheme, (48, 128))
        layer = CompressedLinear(entry, (48, 128), False, torch.bfloat16)
        state = layer.state_dict()
        assert {k: (v.shape, v.dtype) for k, v in state.items()} == {k: (v.shape, v.dtype) for k, v in tensors.items()}
        assert all(v.is_meta for v in state.values())
        with pytest.raises(ArtifactError, match="was not loaded"):
            layer.prepare()


def test_wrong_tensors_are_named():
    entry, tensors, _ = packed(SCHEMES[0], (48, 128))
    without = {key: value for key, value in tensors.items() if key != "weight_scale"}
    with pytest.raises(ArtifactError, match="weight_scale is missing"):
        CompressedLinear.from_tensors(entry, (48, 128), without, None, torch.bfloat16)
    with pytest.raises(ArtifactError, match="weight_packed has shape"):
        CompressedLinear.from_tensors(entry, (48, 160), tensors, None, torch.bfloat16)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_useless_input_scale_is_refused(value):
    entry, tensors, _ = packed(STATIC, (8, 64))
    tensors["input_scale"] = torch.tensor([value], dtype=torch.bfloat16)
    layer = CompressedLinear.from_tensors(entry, (8, 64), tensors, None, torch.bfloat16)
    with pytest.raises(ArtifactError, match="input_scale"):
        layer.prepare()


def test_a_wider_input_scale_is_taken():
    entry, tensors, _ = packed(STATIC, (8, 64))
    tensors["input_scale"] = torch.tensor([0.02])  # float32 in a bfloat16 model
    layer = CompressedLinear.from_tensors(entry, (8, 64), tensors, None, torch.bfloat16)
    layer.prepare()
    assert layer(torch.randn(3, 64).to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_embedding_looks_rows_up(scheme, dtype):
    if scheme.activations is not None:
        scheme = Scheme(scheme.weights)
    entry, tensors, weight = packed(scheme, (37, 64), dtype)
    table = CompressedEmbedding(entry, (37, 64), dtype)
    table.take(tensors)
    ids = torch.tensor([[0, 36, 5], [5, 5, 0]])
    for _ in range(2):
        assert torch.equal(table(ids), weight.dequantize()[ids])
        table.prepare()
    assert table(ids[:0]).shape == (0, 3, 64)
    assert torch.equal(table.dense().weight, weight.dequantize())
    for wrong in (37, -1):
        with pytest.raises(IndexError, match=r"outside \[0, 37\)"):
            table(torch.tensor([wrong]))


def test_an_embedding_looked_up_in_another_dtype_is_its_dense_table():
    entry, tensors, _ = packed(Scheme(GridScheme(8, "int", True, "channel")), (37, 64), torch.bfloat16)
    table = CompressedEmbedding(entry, (37, 64), torch.bfloat16)
    table.take(tensors)
    table.to(torch.float32)
    ids = torch.arange(37)
    assert torch.equal(table(ids), table.dense().weight)
    assert not torch.equal(table(ids), table(ids).bfloat16().float())


# ---------------------------------------------------------------- install
class Conv1D(nn.Module):
    """As in transformers: a linear layer that keeps its matrix transposed."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(64, 8)), nn.Parameter(torch.zeros(8))


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 8


def model():
    body = nn.ModuleDict({"up": nn.Linear(64, 48), "down": nn.Linear(48, 64, bias=False), "conv": Conv1D()})
    return nn.ModuleDict(
        {"embed": nn.Embedding(37, 64), "scaled": Scaled(9, 64), "block": body, "norm": nn.LayerNorm(64)}
    )


ENTRY = ModuleEntry(int_scheme(4), "pack-quantized")


def test_install_replaces_by_name():
    net = model()
    names = ["block.up", "embed", "block.conv"]
    install(net, dict.fromkeys(names, ENTRY))
    assert isinstance(net["block"]["up"], CompressedLinear)
    assert net["block"]["up"].bias is not None
    assert net["block"]["conv"].shape == (8, 64)
    assert isinstance(net["embed"], CompressedEmbedding)
    assert type(net["block"]["down"]) is nn.Linear


@pytest.mark.parametrize(
    ("name", "entry", "words"),
    [
        ("block.upp", ENTRY, "block.upp, which the model does not have"),
        ("norm", ENTRY, "norm is a LayerNorm"),
        ("scaled", ENTRY, "scaled is a Scaled"),
        ("block.up", ModuleEntry(int_scheme(4, group=48), "pack-quantized"), "block.up: format pack-quantized"),
        ("block.up", ModuleEntry(int_scheme(4, sparsity="unstructured"), "bitmap"), "block.up: format bitmap"),
    ],
)
def test_install_refuses(name, entry, words):
    with pytest.raises(ArtifactError, match=words):
        install(model(), {name: entry})


def test_install_twice():
    net = model()
    install(net, {"embed": ENTRY})
    with pytest.raises(ArtifactError, match="compressed already"):
        install(net, {"embed": ENTRY})


def test_install_refuses_a_tied_weight():
    net = model()
    net.all_tied_weights_keys = {"lm_head.weight": "embed.weight"}
    with pytest.raises(ArtifactError, match=r"lm_head\.weight"):
        install(net, {"embed": ENTRY})


def test_prepare_all_uses_a_kernel_where_it_fits():
    net = nn.ModuleDict({"a": linear(int_scheme(4, group=32))[0], "b": linear(STATIC_FREE)[0]})
    best = kernels.find(net["a"].layer).decode.name
    other = kernels.find(net["b"].layer).decode.name
    assert prepare_all(net) == {"a": best, "b": other}
    assert prepare_all(net, "int4-cpu") == {"a": "int4-cpu", "b": other}
    assert prepare_all(net, "reference") == {"a": "reference", "b": "reference"}
    with pytest.raises(RequestError, match=r"int8-cpu .*\(a\)"):
        prepare_all(net, "int8-cpu")
    with pytest.raises(RequestError, match="unknown kernel"):
        prepare_all(net, "int5-cpu")
    broken = copy.deepcopy(net)
    broken["a"].prepare("reference")
    broken["a"].weight_shape[0] = 7
    with pytest.raises(ArtifactError, match=r"a\.weight_shape"):
        prepare_all(broken)


STATIC_FREE = Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme())


def test_dense_is_the_same_layer():
    for scheme, bias in itertools.product(SCHEMES[:4], (True, False)):
        layer, _ = linear(scheme, bias=bias)
        x = torch.randn(3, 128).to(torch.bfloat16)
        layer.prepare("reference")
        assert torch.equal(layer.dense()(x), layer(x))
        assert layer.dense(torch.float32).weight.dtype == torch.float32


# ---------------------------------------------------------------- gradients, and the weight as others see it
@pytest.mark.parametrize("wanted", ["reference", "auto", "fast"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gradients_are_those_of_the_dense_layer(scheme, wanted):
    layer, _ = linear(scheme, dtype=torch.float32)
    layer.prepare(wanted)
    dense = layer.dense()
    for each in (layer, dense):
        each.bias.requires_grad_(True)
    x = torch.randn(2, 5, 128, requires_grad=True)
    out = torch.randn(2, 5, 48)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        y = layer(x)
    assert not saved  # no dense weight lives until the backward pass
    found = torch.autograd.grad(y, (x, layer.bias), out)
    wanted = torch.autograd.grad(dense(x), (x, dense.bias), out)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_inputs_of_another_dtype_come_back_in_theirs():
    layer, _ = linear(int_scheme(4, True, 32))
    layer.prepare()
    x = torch.randn(3, 128, requires_grad=True)
    y = layer(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, layer(x.bfloat16()).float())
    y.sum().backward()
    assert x.grad.dtype == torch.float32


def test_the_weight_is_dequantized_where_it_is_read():
    layer, weight = linear(int_scheme(4, False, 32), bias=False)
    layer.prepare()
    assert isinstance(layer, nn.Linear)
    seen = layer.weight
    assert (seen.shape, seen.dtype, seen.device.type, seen.requires_grad) == ((48, 128), torch.bfloat16, "cpu", False)
    assert torch.equal(seen + 0, weight.dequantize())
    assert torch.equal(nn.functional.linear(torch.eye(128).bfloat16(), seen), weight.dequantize().T)
    with pytest.raises(RequestError, match="would write to a packed weight"):
        seen.mul_(2)
    assert torch.equal(layer.dequantize(), weight.dequantize())


def test_an_assigned_weight_makes_the_layer_dense():
    layer, weight = linear(int_scheme(4, False, 32))
    layer.prepare()
    holder = nn.Sequential(layer)
    bias = layer.bias.clone()
    layer.weight.data += 1
    assert type(holder[0]) is nn.Linear
    assert set(holder.state_dict()) == {"0.weight", "0.bias"}
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(holder(x), nn.functional.linear(x, weight.dequantize() + 1, bias))
    layer.weight.data -= 1  # as PEFT unmerges
    assert isinstance(layer.weight, nn.Parameter)


def test_loading_other_tensors_leaves_the_kernel():
    layer, _ = linear(int_scheme(4, True, 32))
    kernel = layer.prepare()
    holder = nn.ModuleDict({"base": layer, "other": nn.Linear(2, 2)})
    holder.load_state_dict({"other.weight": torch.ones(2, 2)}, strict=False)
    assert layer.choice is kernel
    with pytest.raises(RuntimeError, match=r"base\.weight_packed"):
        holder.load_state_dict(holder["other"].state_dict(prefix="other."))
