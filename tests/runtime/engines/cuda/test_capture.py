"""What may not happen while a graph is captured: the stand-in notices it, and no step of the engine does it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_models import build, engine
from fake_graph import Fake
from weight_cases import random_weight

from runtime import formats
from runtime.engines.base import Chunk
from runtime.engines.cuda import ops
from runtime.engines.cuda.engine import CudaEngine
from runtime.formats.float8_block import Float8Block
from runtime.formats.k_quant import KQuant
from runtime.formats.presets import preset
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme
from runtime.kernels import KERNELS
from runtime.kernels.base import Layer
from runtime.kernels.triton.base import TritonKernel

STATIC = torch.arange(6.0)


def step(compute: Callable[[torch.Tensor], Any]) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        found = compute(STATIC)
        y = found if isinstance(found, torch.Tensor) else STATIC * 2
        return y, y

    return run


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda x: x.sum().item(), "reads a value back"),
        (lambda x: float(x[0]), "reads a value back"),
        (lambda x: x * 2 if x[0] > 0 else x, "reads a value back"),
        (lambda x: torch.equal(x, x), "reads a value back"),
        (lambda x: x.tolist(), "tolist gives values to the host"),
        (lambda x: x.cpu(), "cpu gives values to the host"),
        (lambda x: x.numpy(), "numpy gives values to the host"),
        (lambda x: x.nonzero(), "makes a shape from values"),
        (lambda x: x[x > 2], "makes a shape from values"),
        (lambda x: x.masked_select(x > 2), "makes a shape from values"),
        (lambda x: x.repeat_interleave(x.long()), "makes a shape from values"),
        (lambda x: torch.unique(x), "makes a shape from values"),
        (lambda x: x + torch.tensor([1.0], device=x.device), "the host would send"),
        (lambda x: x + torch.arange(6), "makes a tensor on the host"),
        (lambda x: x + torch.rand(6, device=x.device), "random"),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_it_fails_where_a_graph_would(compute: Any, said: str, inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(AssertionError, match=said):
        Fake()(step(compute))


@pytest.mark.parametrize("inference", [False, True])
def test_it_takes_what_a_graph_takes(inference: bool) -> None:
    weight = torch.rand(6, 6)
    places = torch.tensor([4, 1])

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x[None], weight).softmax(-1)[:, places]
        return torch.where(y > 0, y, 0.0) + torch.zeros(2, device=x.device)

    with torch.inference_mode(inference):
        replay = Fake()(step(compute))
        assert torch.equal(replay()[0], compute(STATIC))


def test_a_replay_is_what_was_captured() -> None:
    """Other memory, other numbers, other shapes, other operations: a graph would go on with those that it has."""
    said = "a graph would replay|another computation"
    state: dict[str, Any] = {"weight": torch.rand(6), "length": 3, "twice": False}

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = x * state["weight"] + state["length"]
        return y * 2 if state["twice"] else y

    replay = Fake()(step(compute))
    replay()
    for name, other in (("weight", torch.rand(6)), ("weight", torch.rand(1)), ("length", 4), ("twice", True)):
        before, state[name] = state[name], other
        with pytest.raises(AssertionError, match=said):
            replay()
        state[name] = before
        replay()


def test_the_hosts_side_of_a_step_is_no_input_of_its_graph() -> None:
    fake = Fake()
    which = engine(build("Llama"), buckets=(2,), capture=fake)
    pool = which.new_pages(2)
    which.step(pool, [Chunk([1], 0, [1])])
    steps, (trace,) = pool.memory.steps, fake.traces
    assert steps is not None
    for tensor in (steps._host_numbers, steps._host_tables, steps._hidden):
        assert tensor.untyped_storage().data_ptr() not in trace.given
    for tensor in (steps._numbers, steps._tables, *pool.memory.tensors):
        assert tensor.untyped_storage().data_ptr() in trace.given


def decode(which: CudaEngine, pools: Sequence[int] = (40, 40, 90)) -> None:
    """Prompts, steps, drafted chains and hidden states of random sequences, in memory that is used again and replaced."""
    draw = random.Random(0)
    for pages in pools:
        pool = which.new_pages(pages)
        tables = [[row, row + 10, row + 20] for row in range(10)]
        done = [draw.randint(1, 30) for _ in tables]
        which.step(pool, [Chunk(range(1, 1 + end), 0, table) for end, table in zip(done, tables, strict=True)])
        for _ in range(6):
            chosen = draw.sample(range(10), draw.randint(1, 6))
            counts = [draw.choice([1, 1, 3]) for _ in chosen]
            chunks = [
                Chunk([draw.randrange(101) for _ in range(count)], done[row], tables[row], outputs=count)
                for row, count in zip(chosen, counts, strict=True)
            ]
            logits, _ = which.verify(pool, chunks, hidden=draw.random() < 0.5)
            assert len(logits) == sum(counts)
            for row, count in zip(chosen, counts, strict=True):
                done[row] += count
        del pool


@pytest.mark.parametrize(
    "name",
    [
        "Llama",
        "Llama, one head for all",
        "Qwen2, windows",
        "Qwen3",
        "Mistral, window",
        "Mixtral",
        "Qwen3Moe, one dense layer",
    ],
)
@pytest.mark.parametrize("fuse", [True, False], ids=["joined", "apart"])
def test_steps_with_kernels_can_be_captured(name: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrappers of the kernels that a GPU runs; launches are written down and compute nothing."""
    pytest.importorskip("triton")
    from runtime.kernels.triton import jit

    fake = Fake()
    which = engine(build(name), fuse, capture=fake, computing=ops.kernels())
    monkeypatch.setattr(jit.Entry, "launcher", fake.launch)
    decode(which)
    launched = {entry[0] for trace in fake.traces for entry in trace.steps}
    assert launched >= {
        "fused.rms_norm_kernel", "rotary_store.rotary_store_kernel", "paged_attention.split_kernel", "paged_attention.join_kernel",
    }  # fmt: skip
    assert len(fake.replays) >= 18
    if fuse and which.parts.mixtures:
        assert launched >= {
            "routing.route_kernel",
            "routing.order_kernel",
            "experts.experts_kernel",
            "experts.combine_kernel",
        }


def test_compressed_layers_can_be_captured(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from runtime import kernels as table
    from runtime.checkpoint.artifact import Artifact
    from runtime.engines.blueprint import Blueprint
    from runtime.engines.llama_structure import Program, read_program
    from runtime.kernels import Choice
    from runtime.kernels.triton import jit
    from runtime.kernels.triton.linear import W4A16Triton
    from runtime.layers.compressed_linear import CompressedLinear

    kernel, cpu = W4A16Triton("cpu"), torch.device("cpu")
    choice = Choice(kernel, kernel, kernel)
    torch_engine = Blueprint(Artifact(tiny_artifact), cpu, "reference", torch.bfloat16, False).build()
    for module in torch_engine.module.modules():
        if isinstance(module, CompressedLinear):
            module.prepare(choice=choice)
    monkeypatch.setattr(table, "find", lambda layer, kernels="auto": choice)
    program, fake = read_program(torch_engine.module, fuse=True), Fake()
    assert isinstance(program, Program)
    which = CudaEngine(
        torch_engine, program, capture=fake, computing=ops.kernels(), page_size=16, buckets=(1, 2, 4, 8, 64, 128)
    )
    monkeypatch.setattr(jit.Entry, "launcher", fake.launch)
    decode(which)
    pool = which.new_pages(150)
    for rows in (60, 120):
        which.step(pool, [Chunk([row % 101], 0, [row]) for row in range(rows)])
    launched = {entry[0] for trace in fake.traces for entry in trace.steps}
    assert launched >= {"matvec.matvec_kernel", "matmul.matmul_kernel"}


INT4 = GridScheme(4, "int", True, "group", 32)
INT8, FLOAT8 = GridScheme(8, "int", True, "channel"), GridScheme(8, "float", True, "channel")
LAYERS = {
    "W4A16Triton": (Scheme(INT4), "pack-quantized"),
    "W8A16Triton": (Scheme(INT8), "int-quantized"),
    "Sparse24Triton": (Scheme(GridScheme(4, "int", False, "group", 64), None, "2:4"), "sparse24"),
    "W8A8Triton": (Scheme(INT8, ActivationScheme(8, "int", False, True, "token")), "int-quantized"),
    "W8A8Triton, static": (Scheme(INT8, ActivationScheme(8, "int", False, False, "tensor")), "int-quantized"),
    "RoundedTriton": (Scheme(INT4, ActivationScheme(4)), "pack-quantized"),
    "RoundedTriton, static": (Scheme(INT4, ActivationScheme(8, "int", True, False, "tensor")), "int-quantized"),
    "RoundedTriton, groups": (
        Scheme(INT4, ActivationScheme(4, strategy="group", group_size=32, int8_tail=32)),
        "pack-quantized",
    ),
    "RoundedTriton, float8": (Scheme(INT4, ActivationScheme(8, "float")), "pack-quantized"),
    "Float8BlockTriton": (Scheme(Float8Block(), ActivationScheme(8, "float")), "float-quantized"),
    "BlockFloatTriton": (preset("NVFP4A16"), "nvfp4-pack-quantized"),
    "BlockFloatTriton, rounded": (preset("NVFP4"), "nvfp4-pack-quantized"),
    "BlockFloatTriton, powers of two": (preset("MXFP4"), "mxfp4-pack-quantized"),
    "BlockFloatTriton, on sm_100": (preset("NVFP4"), "nvfp4-pack-quantized"),
    "W8A8Triton, float8": (Scheme(FLOAT8, ActivationScheme(8, "float")), "float-quantized"),
    "RowCodebookTriton": (Scheme(RowCodebook(3, None, 0.02)), "row_codebook"),
    "KQuantTriton": (Scheme(KQuant("Q4_K")), "k_quant"),
    "KQuantTriton, a table": (Scheme(KQuant("IQ4_XS")), "k_quant"),
}


def test_every_kernel_of_weights_has_a_layer() -> None:
    kernels = {type(each).__name__ for each in KERNELS if isinstance(each, TritonKernel)}
    assert kernels == {name.partition(",")[0] for name in LAYERS}


@pytest.mark.parametrize("name", LAYERS)
def test_every_kernel_of_weights_can_be_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from runtime.kernels.triton import gpu, jit

    scheme, storage = LAYERS[name]
    tensors = formats.get(storage).pack(random_weight(scheme, (64, 256)))
    if scheme.activations is not None and scheme.activations.dynamic == "local":
        tensors |= {"input_global_scale": torch.ones(1)}
    elif scheme.activations is not None and not scheme.activations.dynamic:
        tensors |= {"input_scale": torch.ones(1).bfloat16(), "input_zero_point": torch.ones(1, dtype=torch.int8)}
    layer = Layer(ModuleEntry(scheme, storage, None), (64, 256), torch.bfloat16, torch.device("cpu"))
    classes = {type(each).__name__: type(each) for each in KERNELS if isinstance(each, TritonKernel)}
    kernel = classes[name.partition(",")[0]]("cpu")
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith("input_")}  # as modules keep them
    prepared, bias, fake = kept | kernel.prepare(tensors, layer), torch.zeros(64).bfloat16(), Fake()
    monkeypatch.setattr(jit.Entry, "launcher", fake.launch)
    for rows in (1, 3, 17, 70, 300):
        x = torch.randn(rows, 256).bfloat16()
        with gpu.assuming(100 if name.endswith("sm_100") else 90):
            replay = fake(step(lambda _, x=x: kernel.run(x, prepared, layer, bias)))
            assert replay()[0].shape == (rows, 64)
        assert any("_kernel" in entry[0] for entry in fake.traces[-1].steps)
    launched = {entry[0] for trace in fake.traces for entry in trace.steps}
    assert ("block_float.block_float_kernel" in launched) == name.endswith("sm_100")
