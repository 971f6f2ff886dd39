"""Every family through the operations in C against transformers' own modules."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_models import SCHEMES
from llama_engines import native
from mixture_models import apart
from program_families import FAMILIES, FLOAT8, compressed, model_of

from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.parts import Parts, Structures, read_parts
from runtime.engines.native.take_over import disproof, kinds, take_over
from runtime.engines.program.operations import UnknownError, decode, encode
from runtime.engines.program.read import read
from runtime.engines.torch.engine import TorchEngine
from runtime.formats.input_transform import InputOrder, InputTransform
from runtime.formats.k_quant import KINDS, KQuant
from runtime.formats.presets import preset
from runtime.formats.scheme import GridScheme, Scheme
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

CPU = torch.device("cpu")
TEXTS = torch.randint(3, 300, (2, 70), generator=torch.Generator().manual_seed(0))


@functools.cache
def dense(name: str) -> tuple[TorchEngine, NativeEngine]:
    model = model_of(name)
    return TorchEngine(model, CPU), native(model)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_dense_models(name: str) -> None:
    plain, lean = dense(name)
    wanted, found = plain.logits(TEXTS), lean.logits(TEXTS)
    assert error(found, wanted) < 1e-5
    best, second = wanted.topk(2, dim=-1).values.unbind(-1)
    assert bool(((found.argmax(-1) == wanted.argmax(-1)) | (best - second < 1e-3)).all())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_compressed_models(name: str) -> None:
    small, twin = compressed(model_of(name))
    lean = native(small)
    assert lean.parts.digits, "its layers are compressed"
    assert error(lean.logits(TEXTS), TorchEngine(twin, CPU).logits(TEXTS)) < 1e-5


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GPT2", "Falcon", "Phi3", "Cohere2", "DeepseekV3", "GptOss"])
def test_logits_of_float8_models(name: str) -> None:
    """Weights of one byte, of experts too, beside dense routers and heads."""
    small, twin = compressed(apart(model_of(name)), FLOAT8)
    lean = native(small)
    assert "float8-c" in lean.explain().values()
    assert not lean.parts.digits
    wanted, found = TorchEngine(twin, CPU).logits(TEXTS), lean.logits(TEXTS)
    assert error(found, wanted) < 1e-5
    pool = lean.new_pages(2)
    for start, end in ((0, 1), (1, 40), (40, 70)):
        row = lean.read(pool, [Chunk(TEXTS[0, start:end].tolist(), start, [1, 0])], every=True)
        assert torch.equal(row, found[0, start:end])


OWN_KERNELS = {
    **dict.fromkeys(("mxfp4-pack-quantized", "nvfp4-pack-quantized"), "fp4-c"),
    "mxfp8-quantized": "float8-c",
    "trellis": "trellis-c",
    "row_codebook": "row-codebook-c",
    "ternary_dictionary": "ternary-c",
    **dict.fromkeys(KINDS, "k-quant-c"),
}


@pytest.mark.sampled(14, 4)
@pytest.mark.parametrize("storage", OWN_KERNELS)
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_tokens_of_models_of_other_representations(name: str, storage: str) -> None:
    """Dense layers and experts: logits as of modules with the same weights in float64, and the text that comes of them."""
    hidden, heads, inner, count = (256, 32, 256, 8) if storage in KINDS else (96, 16, 128, 6)
    made = model_of(name, hidden_size=hidden, head_dim=heads, intermediate_size=inner, num_attention_heads=count)
    small, twin = compressed(apart(made), Scheme(KQuant(storage)) if storage in KINDS else SCHEMES[storage])
    lean, plain = native(small), TorchEngine(twin, CPU)
    assert OWN_KERNELS[storage] in lean.explain().values()
    assert "reference" not in lean.explain().values()
    exact = TorchEngine(copy.deepcopy(twin).double(), CPU).logits(TEXTS)
    assert error(lean.logits(TEXTS).double(), exact) < 1e-5
    texts = [TEXTS[:1].clone(), TEXTS[:1].clone()]
    for _ in range(12):
        for number, engine in enumerate((lean, plain)):
            texts[number] = torch.cat((texts[number], engine.logits(texts[number])[:, -1:].argmax(-1)), 1)
    assert torch.equal(*texts)


ROUNDED = ("W8A8-INT8", "LLM.int8", "W4A8", "W4A4", "W4AFP8", "FP8_DYNAMIC", "FP8", "NVFP4", "MXFP4", "MXFP8")


@functools.cache
def rounded(name: str, scheme: str) -> tuple[Any, Any]:
    """Compressed, and with the same weights dense."""
    made = model_of(name, hidden_size=128, head_dim=32, intermediate_size=256, num_attention_heads=4)
    found = preset(scheme)
    if scheme == "FP8":  # static activations; `nearest` makes a scale a row
        found = replace(found, weights=GridScheme(8, "float", True, "channel"))
    return compressed(apart(made), found)


@pytest.mark.parametrize("scheme", ROUNDED)
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_models_that_round_their_inputs(name: str, scheme: str) -> None:
    """Codes flip at rounding boundaries between the engines: few rows must agree exactly, the others within the quantization error."""
    small, twin = rounded(name, scheme)
    lean, plain = native(small), TorchEngine(small, CPU)
    assert "reference" not in lean.explain().values()
    inner = [each for each in lean.parts.inputs if isinstance(each, library.Linear) and each.rows == 256]
    assert inner, "gates and up projections"
    assert all(each.rounding.kind for each in inner)
    wanted, found = plain.logits(TEXTS), lean.logits(TEXTS)
    rows = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float((rows < 1e-5).float().mean()) > (0.5 if "FP" in scheme else 0.03)
    assert error(found, wanted) < 1.5 * error(TorchEngine(twin, CPU).logits(TEXTS), wanted)


TURNED = {
    "integers": SCHEMES["pack-quantized"],
    "groups of 8": (SCHEMES["pack-quantized"], 8),
    "float8": FLOAT8,
    "W4A4": preset("W4A4"),
    "LLM.int8": preset("LLM.int8"),
    "FP8_DYNAMIC": preset("FP8_DYNAMIC"),
    "NVFP4": (preset("NVFP4"), 16),
    "order": replace(SCHEMES["pack-quantized"], transform=InputOrder("order")),
    "Atom": replace(preset("Atom"), activations=replace(preset("Atom").activations, group_size=64, int8_tail=64)),
}


@functools.cache
def turned(name: str, kind: str) -> tuple[Any, Any]:
    """Layers that transform their inputs, and dense ones of the same weights; sizes that no vector divides, where nothing forbids them."""
    scheme, block_size = TURNED[kind] if isinstance(TURNED[kind], tuple) else (TURNED[kind], None)  # type: ignore[misc]
    odd = scheme.activations is None and block_size is None
    sizes = {} if odd else {"hidden_size": 128, "head_dim": 32, "intermediate_size": 384, "num_attention_heads": 4}
    transform = scheme.transform or InputTransform("random", block_size)
    return compressed(model_of(name, **sizes), replace(scheme, transform=transform))


@pytest.mark.parametrize("kind", TURNED)
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Cohere2"])
def test_models_that_transform_their_inputs(name: str, kind: str) -> None:
    """In C as in modules, and as plain layers of the weights that they stand for."""
    if name == "GPT2" and kind not in ("integers", "float8", "order"):
        name = "Phi3"
    small, twin = turned(name, kind)
    lean, plain = native(small), TorchEngine(small, CPU)
    own = [each for each in lean.parts.inputs if isinstance(each, library.Linear) and each.basis]
    assert own
    if kind in ("order", "Atom"):
        assert all(each.basis.order and each.rounding.tail == (64 if kind == "Atom" else 0) for each in own)
    else:
        whole = not isinstance(TURNED[kind], tuple)
        assert all((each.basis.left * each.basis.right == each.columns) == whole for each in own)
    wanted, found = plain.logits(TEXTS), lean.logits(TEXTS)
    if not own[0].rounding.kind:
        assert error(found, wanted) < 1e-5
        assert error(found, TorchEngine(twin, CPU).logits(TEXTS)) < 1e-5
        return
    rows = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float((rows < 1e-4).float().mean()) > 0.02
    assert error(found, wanted) < 1.5 * error(TorchEngine(twin, CPU).logits(TEXTS), wanted)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *((name, None) for name in FAMILIES),
        *(("GptOss", each) for each in ROUNDED),
        *(("Llama", each) for each in TURNED),
    ],
)
def test_bits_do_not_depend_on_cuts_neighbours_or_threads(name: str, scheme: str | None) -> None:
    made = turned if scheme in TURNED and name == "Llama" else rounded
    lean = dense(name)[1] if scheme is None else native(made(name, scheme)[0])
    texts = [TEXTS[0, :67].tolist(), TEXTS[1, :5].tolist(), TEXTS[1, :33].tolist()]
    alone = torch.stack([lean.step(lean.new_pages(2), [Chunk(text, 0, [1, 0])])[0] for text in texts])
    pool = lean.new_pages(6)
    pages = [[4, 2], [0, 5], [3, 1]]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            chunks = [Chunk(text, 0, mine) for text, mine in zip(texts, pages, strict=True)]
            assert torch.equal(lean.step(pool, chunks), alone)
            rows = lean.read(pool, chunks, every=True)  # the last layer of all rows, or of those that are asked for
            few = [Chunk(text, 0, mine, outputs=3) for text, mine in zip(texts, pages, strict=True)]
            sums = torch.tensor([len(text) for text in texts]).cumsum(0)
            wanted = torch.cat([rows[end - 3 : end] for end in sums.tolist()])
            for hidden in (False, True):
                assert torch.equal(lean.verify(pool, few, hidden=hidden)[0], wanted)
            firsts = [Chunk(text[:-2], 0, mine) for text, mine in zip(texts, pages, strict=True)]
            lean.step(pool, firsts)
            for left in (2, 1):
                ends = [Chunk([text[-left]], len(text) - left, mine) for text, mine in zip(texts, pages, strict=True)]
                found = lean.step(pool, ends)
            assert torch.equal(found, alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GPTNeoX", "Falcon"])
def test_sixteen_bit_models(name: str, dtype: torch.dtype) -> None:
    model = model_of(name).to(dtype)
    exact = TorchEngine(model_of(name).to(dtype).float(), CPU).logits(TEXTS)
    theirs = TorchEngine(model, CPU).logits(TEXTS)
    assert error(native(model).logits(TEXTS), exact) <= 1.1 * error(theirs, exact)


# ---------------------------------------------------------------- what is refused
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 128, "factor": 2.0}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Llama", {"hidden_act": "mish"}, "layers.0.mlp.down_proj reads no known activation .* MishActivation"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}, "dynamic, which changes with the length"),
        ("Falcon", {"alibi": True}, "self_attention computes attention with a mask that it does not know"),
        ("Apertus", {}, "mlp.act_fn is a XIELUActivation"),
        ("Olmo", {"clip_qkv": 8.0}, "OlmoLayerNorm, is neither an RMS norm nor a layer norm"),
        ("Gemma3", {"use_bidirectional_attention": True}, "hides other positions|mask that it does not know"),
        ("GPTJ", {"n_embd": 72, "n_layer": 2, "n_head": 6, "rotary_dim": 8}, "makes its queries in a way"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(name: str, changes: dict[str, Any], said: str) -> None:
    import re

    engine = TorchEngine(model_of(name, **changes), CPU)
    reason = read_parts(engine.module, CPU)
    assert isinstance(reason, str)
    assert re.search(said, reason), reason
    assert take_over(engine) is None
    assert reason in engine.explain()["model"]


def test_bounds_of_numbers_are_seen() -> None:
    model = model_of("Llama")
    attention = model.model.layers[1].self_attn

    class Clipped(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
            found = super().forward(hidden_states, *rest, **named)
            return found[0].clamp(-8, 8), found[1]

    attention.__class__ = Clipped
    assert "model.layers.1.post_attention_layernorm" in str(read_parts(model, CPU)), (
        "it reads no sum of what was computed"
    )


def test_a_program_that_computes_otherwise_is_found_out() -> None:
    model = model_of("Gemma3")
    engine = native(model)
    assert disproof(engine) is None
    assert kinds(engine.parts) == [0, 1]
    parts = engine.parts
    assert isinstance(parts, Parts)
    for op in (parts.blocks[1].ops[i] for i in range(parts.blocks[1].count)):
        if op.kind == 3:
            op.attend.scale *= 1.05
    assert "differ by" in str(disproof(engine))


@pytest.mark.parametrize("name", FAMILIES)
def test_programs_come_back_from_json(name: str) -> None:
    program = read(model_of(name))
    assert decode(json.loads(json.dumps(encode(program)))) == program


def test_reading_needs_no_weights() -> None:
    from runtime.modeling.skeleton import build_skeleton

    for name in ("Gemma3", "GPT2", "Falcon"):
        model = model_of(name)
        skeleton = build_skeleton(model.config, torch.float32)
        assert read(skeleton) == read(model)


def test_an_operation_that_c_does_not_know_is_refused():
    class Convolve:
        half = None

    with pytest.raises(UnknownError, match="no operation in C is a convolve"):
        Structures.__new__(Structures)._op(Convolve(), {})  # type: ignore[arg-type]
