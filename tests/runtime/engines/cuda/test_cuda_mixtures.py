"""Mixtures of experts in the engine: transformers' tokens, weights as one tensor a projection, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mixture_models
import pytest
import torch
from ahead_cases import CPU, FakeDriver, write_kernels
from cuda_models import W4, W8, apart, build, engine, packed
from fake_graph import Fake
from torch import nn

from runtime.engines.base import Chunk
from runtime.engines.cuda import engine as engine_module
from runtime.engines.cuda import ops, take_over
from runtime.engines.llama_structure import Program, RoutedExperts, read_program
from runtime.engines.torch.engine import TorchEngine
from runtime.formats.input_transform import InputTransform
from runtime.formats.scheme import GridScheme, Scheme
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.experts import Experts

FAMILIES = ["Mixtral", "Qwen3Moe", "Qwen3Moe, one dense layer"]
IDS = list(range(3, 24))


def weight_bytes(model: nn.Module) -> int:
    """Of distinct memory."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def mixtures(model: Any, fuse: bool = True) -> list[RoutedExperts]:
    program = read_program(model, fuse)
    assert isinstance(program, Program), program
    return program.mixtures


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    model = build(name)
    wanted = model.generate(torch.tensor([IDS]), max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)
    which = engine(model, buckets=(2,))
    pool, tokens = which.new_pages(3), list(IDS)
    tokens.append(int(which.step(pool, [Chunk(tokens, 0, [2, 0, 1])])[0].argmax()))
    while len(tokens) < wanted.shape[1]:
        last = Chunk(tokens[-1:], len(tokens) - 1, [2, 0, 1])
        tokens.append(int(which.step(pool, [last])[0].argmax()))
    assert tokens == wanted[0].tolist()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("form", ["in one", "one by one", "4 bits", "8 bits"])
def test_weights_are_stacked_in_the_memory_of_the_modules(name: str, form: str) -> None:
    changes: dict[str, Callable[[Any], Any]] = {
        "in one": lambda m: m, "one by one": apart, "4 bits": packed, "8 bits": lambda m: packed(m, W8),
    }  # fmt: skip
    model = changes[form](build(name))
    with torch.inference_mode():
        wanted = model(torch.tensor([IDS])).logits
    held = weight_bytes(model)
    first = mixtures(model)
    assert weight_bytes(model) == held
    with torch.inference_mode():  # transformers' modules go on working
        torch.testing.assert_close(model(torch.tensor([IDS])).logits, wanted)
    for old, new in zip(first, mixtures(model), strict=True):  # a second engine has the same memory
        assert old.stacks is not None
        assert new.stacks is not None
        for side in ("gate_up", "down"):
            a, b = getattr(old.stacks, side), getattr(new.stacks, side)
            assert a.count == len(old.router)
            for x, y in zip(a.operands, b.operands, strict=True):
                assert (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())
    assert weight_bytes(model) == held


@pytest.mark.parametrize("scheme", [W4, W8], ids=["4 bits", "8 bits"])
def test_stacks_hold_the_weights_of_the_experts(scheme: Scheme) -> None:
    from triton_references import dequantize

    from runtime.kernels.triton.layout import Weight

    model = packed(build("Mixtral"), scheme)
    experts = next(each for each in model.modules() if isinstance(each, Experts))
    wanted = [
        [expert.get_submodule(name).dequantize() for name in ("gate_proj", "up_proj", "down_proj")]  # type: ignore[operator]
        for expert in experts.one_by_one()
    ]
    stacks = mixtures(model)[0].stacks
    assert stacks is not None
    for number, (gate, up, down) in enumerate(wanted):
        for stack, dense in ((stacks.gate_up, torch.cat([gate, up])), (stacks.down, down)):
            zero = None if stack.zero is None else stack.zero[number]
            one = Weight(stack.words[number], stack.scale[number], zero, stack.shape, stack.group, stack.field)
            assert torch.equal(dequantize(one, torch.float16), dense)


def test_an_engine_over_packed_experts() -> None:
    """In plain torch: every expert computes every row."""
    model = packed(build("Qwen3Moe"))
    with torch.inference_mode():
        wanted = model(torch.tensor([IDS])).logits[0].float()
    which = engine(model, buckets=(1,))
    pool = which.new_pages(2)
    which.step(pool, [Chunk(IDS[:-1], 0, [1, 0])])
    found = which.step(pool, [Chunk(IDS[-1:], len(IDS) - 1, [1, 0])])[0]
    assert float((found - wanted[-1]).norm() / wanted[-1].norm()) < 1e-2


def test_steps_over_packed_experts_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from runtime.kernels.triton import jit

    fake = Fake()
    which = engine(packed(build("Mixtral")), capture=fake, computing=ops.kernels(), buckets=(1, 2, 4, 64))
    monkeypatch.setattr(jit.Entry, "launcher", fake.launch)
    pool = which.new_pages(70)
    for count in (1, 2, 3, 64, 4):
        which.step(pool, [Chunk([row], 0, [row]) for row in range(count)])
        which.step(pool, [Chunk([row], 1, [row]) for row in range(count)])
    launched = [{entry[0] for entry in trace.steps} for trace in fake.traces]
    grouped = ["experts.experts_vector_kernel" if size <= 2 else "experts.experts_kernel" for size in (1, 2, 4, 64)]
    for found, kernel in zip(launched, grouped, strict=True):
        assert {name for name in found if name.startswith("experts.")} == {kernel, "experts.combine_kernel"}
        assert ("routing.order_kernel" in found) == (kernel == "experts.experts_kernel")


@pytest.mark.parametrize(("name", "of_chosen"), [("Qwen3Moe", True), ("Qwen3Moe, one dense layer", False)])
def test_the_kernel_gets_the_rule_of_the_router(name: str, of_chosen: bool) -> None:
    from runtime.kernels.triton import jit

    model = build(name)
    mixture = mixtures(model)[0]
    mixture = replace(mixture, routing=replace(mixture.routing, scale=2.5))  # which neither family has
    with jit.recording() as launches:
        ops.kernels().mixture(torch.empty(3, model.config.hidden_size), mixture)
    (route,) = [launch for launch in launches if launch.kernel.__name__ == "route_kernel"]
    choices = model.config.num_experts_per_tok
    assert [route.arguments[key] for key in ("CHOICES", "OF_CHOSEN", "factor")] == [choices, of_chosen, 2.5]


@pytest.mark.parametrize("make", [packed, apart, lambda model: model], ids=["packed", "one by one", "in one"])
def test_explain_names_what_computes_the_experts(make: Callable[[Any], Any]) -> None:
    model = make(build("Qwen3Moe"))
    in_torch = engine(model, computing=ops.TORCH).explain()
    assert "experts-triton" not in in_torch.values()
    found = engine(model, computing=ops.kernels()).explain()
    assert {kernel for layer, kernel in found.items() if ".experts" in layer} == {"experts-triton"}
    assert {kernel for layer, kernel in found.items() if ".experts" not in layer} <= set(in_torch.values())


# ---------------------------------------------------------------- what is refused
def one_other() -> Any:
    model = packed(build("Mixtral"))
    other = packed(build("Mixtral"), W8)
    for mine, its in zip(model.modules(), other.modules(), strict=True):
        if isinstance(mine, Experts):
            mine[1].up_proj = its[1].up_proj
    return model


def one_dense() -> Any:
    model = packed(build("Mixtral"))
    experts = next(each for each in model.modules() if isinstance(each, Experts))
    layer: Any = experts[2]
    layer.down_proj = layer.down_proj.dense()
    return model


def watched() -> Any:
    model = apart(build("Mixtral"))
    experts: Any = next(each for each in model.modules() if isinstance(each, Experts))
    experts[0].up_proj.register_forward_hook(lambda *_: None)
    return model


def watched_before() -> Any:
    model = packed(build("Mixtral"))
    experts: Any = next(each for each in model.modules() if isinstance(each, Experts))
    experts[0].up_proj.register_forward_pre_hook(lambda *_: None)
    return model


def without_kernels() -> Any:
    model = packed(build("Mixtral"))
    for experts in [each for each in model.modules() if isinstance(each, Experts)]:
        for layer in experts.modules():
            if hasattr(layer, "unprepare"):
                layer.unprepare()
    return model


def transformed() -> Any:
    model = packed(build("Mixtral"))
    scheme = replace(W4, transform=InputTransform("hadamard_groups", 16))
    for layer in [each for each in model.modules() if isinstance(each, CompressedLinear)]:
        layer.entry = replace(layer.entry, scheme=scheme)
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "experts of other bits": (one_other, "up_proj of its experts: compressed in different ways"),
    "a dense expert": (one_dense, "down_proj of its experts: layers are of different kinds"),
    "a hook": (watched, "layers are of different kinds"),
    "a hook before a packed layer": (watched_before, "compressed in different ways"),
    "transformed inputs": (transformed, "its experts: inputs are transformed"),
    "other kernels": (without_kernels, "computed by reference, and only integer weights"),
    "scales of tensors": (
        lambda: packed(build("Mixtral"), Scheme(GridScheme(4, "int", True, "tensor"))), "one scale for several rows",
    ),
    "biases": (lambda: mixture_models.model_of("GptOss"), "by more than a softmax of its logits: a bias"),
    "shared experts": (lambda: mixture_models.model_of("Qwen2Moe"), "operations of model.layers.0 are not a Llama's"),
    "groups": (lambda: mixture_models.model_of("Glm4Moe"), "not computed as a Llama is"),
    "scaled residuals": (lambda: mixture_models.model_of("GraniteMoe"), "not computed as a Llama is"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    make, said = REFUSED[name]
    model = make()
    names = {key: id(module) for key, module in model.named_modules()}
    reason = read_program(model, fuse=True)
    assert isinstance(reason, str)
    assert said in reason
    assert {key: id(module) for key, module in model.named_modules()} == names, "nothing was joined"


def test_ranks_do_not_divide_mixtures() -> None:
    assert read_program(build("Mixtral"), mixtures=False) == (
        "MixtralForCausalLM is not computed as a Llama is: model.layers.0 has routed experts"
    )


@pytest.mark.parametrize("installed", [True, False])
def test_it_takes_mixtures_where_triton_is(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module.ops, "choose", lambda _: ops.kernels() if installed else ops.TORCH)
    monkeypatch.setattr(engine_module.gpu, "capability", lambda _: (9, 0))
    monkeypatch.setattr(engine_module, "CudaGraphs", lambda _: Fake())
    monkeypatch.setattr(TorchEngine, "device", SimpleNamespace(type="cuda", index=0), raising=False)
    model = TorchEngine(build("Mixtral"), torch.device("cpu"))

    class Stub:
        def __init__(self, *_: Any, computing: ops.Ops, **__: Any) -> None:
            self.name = computing.name

    monkeypatch.setattr(engine_module, "CudaEngine", Stub)
    model.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    found = take_over(model)
    assert (None if found is None else found.name) == ("triton" if installed else None)  # type: ignore[attr-defined]
    monkeypatch.setattr(engine_module.ops, "missing_launch", lambda *_: "experts.experts_kernel")
    assert take_over(model) is None


@pytest.mark.parametrize("form", ["dense", "one by one", "packed"])
def test_without_a_compiler_every_launch_must_have_been_compiled(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.kernels.triton import aot, experts, jit, signature

    make: dict[str, Callable[[], Any]] = {
        "dense": lambda: build("Mixtral").half(), "one by one": lambda: apart(build("Mixtral").half()),
        "packed": lambda: packed(build("Qwen3Moe")),
    }  # fmt: skip
    model = make[form]()
    names = {key: id(module) for key, module in model.named_modules()}
    for module in jit.MODULES:  # what is first imported without a compiler has none in later tests either
        import_module(module)
    monkeypatch.setattr(jit, "INSTALLED", False)
    missing = ops.missing_launch(model, CPU)
    assert missing == "routing.route_kernel", "none was offered"
    assert {key: id(module) for key, module in model.named_modules()} == names, "nothing was joined"
    joined = make[form]()
    with jit.recording() as launches:
        for each in mixtures(joined):
            for tokens in experts.token_counts(len(each.router), each.routing.chosen):
                ops.kernels().mixture(torch.empty(tokens, 64, dtype=torch.float16, device="meta"), on_meta(each))
    variants = list(dict.fromkeys(signature.of(launch) for launch in launches))
    try:
        aot.offer(write_kernels(tmp_path / "most", variants[:-1]), CPU, FakeDriver())
        assert ops.missing_launch(model, CPU) == variants[-1].describe()
        aot.offer(write_kernels(tmp_path / "all", variants), CPU, FakeDriver())
        assert ops.missing_launch(model, CPU) is None
    finally:
        aot.withdraw()


def on_meta(experts: RoutedExperts) -> RoutedExperts:
    def blank(stack: Any) -> Any:
        zero = None if stack.zero is None else stack.zero.to("meta")
        return replace(stack, words=stack.words.to("meta"), scale=stack.scale.to("meta"), zero=zero)

    stacks = experts.stacks
    assert stacks is not None
    held = replace(stacks, gate_up=blank(stacks.gate_up), down=blank(stacks.down))
    return replace(experts, router=experts.router.to("meta"), stacks=held)
