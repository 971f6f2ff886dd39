"""Kernels compiled ahead: what they are compiled for, which one a launch takes, and how it is launched. No GPU is needed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_cases import CPU, FakeDriver, w4_layer, w4_tensors, write_kernels
from triton_references import forced

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import gpu_launches

from export.triton_aot.worker import compile_variant
from runtime import formats
from runtime.errors import ArtifactError, CompressError
from runtime.formats.k_quant import KINDS, KQuant
from runtime.formats.presets import preset
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme
from runtime.kernels.base import Layer
from runtime.kernels.triton import aot, cubins, gpu, jit, signature, tuning
from runtime.kernels.triton.aot import CudaDriver
from runtime.kernels.triton.base import TritonKernel
from runtime.kernels.triton.codebooks import KQuantTriton, RowCodebookTriton
from runtime.kernels.triton.linear import (
    BlockFloatTriton,
    Sparse24Triton,
    W4A16Triton,
    W8A8Triton,
    W8A16Triton,
)
from runtime.kernels.triton.signature import Variant

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


@pytest.fixture(autouse=True)
def nothing_offered() -> Iterator[None]:
    yield
    aot.withdraw()


def matvec_arguments(x: torch.Tensor, /, **changes: Any) -> dict[str, Any]:
    """Of `matvec_kernel`, for a layer of 48 x 256."""
    words, scale = torch.zeros(2, 48, 16, dtype=torch.int32), torch.zeros(8, 48, dtype=torch.bfloat16)
    arguments = {
        "x": x, "words": words, "scale": scale, "zero": scale, "bias": x, "out": torch.zeros(48, dtype=torch.bfloat16),
        "stride": 256, "M": 1, "N": 48, "K": 256, "tiles": 2, "groups": 8, "GROUP": 32, "FIELD": 4, "CODES": "integer", "RUN": 2,
        "ASYMMETRIC": False, "HAS_BIAS": False, "EVEN_K": False, "ROWS": 1, "BLOCK_N": 16, "TILES": 4, "SPLIT_K": 1,
        "num_warps": 4,
    }  # fmt: skip
    return arguments | changes


def matvec() -> jit.Entry:
    from runtime.kernels.triton.matvec import matvec_kernel

    return matvec_kernel


ALIGNED = torch.zeros(512, dtype=torch.bfloat16)


# ---------------------------------------------------------------- what triton would compile
CALLS: dict[str, dict[str, Any]] = {
    "one row": {}, "five": {"M": 5}, "sixteen": {"M": 16}, "none": {"M": 0}, "far rows": {"stride": 1 << 40},
    "negative": {"N": -16}, "one tile": {"tiles": 1}, "not aligned": {"x": ALIGNED[1:257]}, "a view": {"x": ALIGNED[8:]},
    "asymmetric": {"ASYMMETRIC": True}, "float32": {"out": torch.zeros(48)},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_specialized_as_triton_does(name: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    arguments = matvec_arguments(ALIGNED, **CALLS[name])
    function = matvec().jitted
    bind = create_function_from_signature(function.signature, function.params, make_backend(GPUTarget("cuda", 90, 32)))
    _, theirs, options = bind(**arguments)
    variant = signature.specialize(matvec(), arguments)
    assert dict(variant.options) == options
    passed = dict(variant.passed)
    for (name, code), (kind, attribute) in zip(variant.arguments, theirs, strict=True):
        assert (name in passed) == (kind != "constexpr")
        if kind == "constexpr":
            assert code.endswith("/1") or signature.constant(code) == attribute
        else:
            assert code == kind + ("/16" if attribute else ""), name


def test_a_kernel_with_fewer_assumptions_serves() -> None:
    def serves(mine: str, call: str) -> bool:
        return Variant("k", (("x", mine),), ()).serves(Variant("k", (("x", call),), ()))

    assert serves("*bf16", "*bf16/16")
    assert not serves("*bf16/16", "*bf16")
    assert not serves("*fp16", "*bf16/16")
    assert serves("i32", "i32/1")
    assert not serves("i32/16", "i32/1")
    assert not serves("i32", "i64")
    assert not serves("=1", "=True")
    assert not serves("=2", "=3")
    assert serves("='a/b'", "='a/b'")
    assert not serves("='a'", "='a/b'")
    variant = signature.specialize(matvec(), matvec_arguments(ALIGNED))
    assert variant.serves(variant)
    assert not Variant(variant.kernel, variant.arguments, (("num_warps", 8),)).serves(variant)


def test_of_several_that_serve_the_one_that_assumes_most(tmp_path: Path) -> None:
    calls = [matvec_arguments(ALIGNED, M=m) for m in (5, 16)]
    general, exact = (signature.specialize(matvec(), call) for call in calls)
    driver = FakeDriver()
    aot.offer(write_kernels(tmp_path, [general, exact]), CPU, driver)
    for call, file in (
        (calls[1], 1),
        (calls[0], 0),
        (matvec_arguments(ALIGNED, M=32), 1),
        (matvec_arguments(ALIGNED), 0),
    ):
        driver.loaded.clear()
        driver.launches.clear()
        aot._loaded._functions.clear()  # type: ignore[union-attr]
        matvec()[(3, 2)](**call)
        ((data, name, shared, threads),) = driver.loaded
        assert (name, shared, threads) == (f"kernel_{file}", 1024 + file, 128)
        assert data == (tmp_path / "kernels" / f"{file}.cubin").read_bytes()
        ((launch),) = driver.launches
        assert launch["grid"] == (3, 2, 1)
        passed = 12  # six pointers, six integers: M is none of the constants of a general kernel
        assert len(launch["slots"]) == 8 * (passed + 2)
        assert launch["slots"][-16:] == bytes(16)
        assert int.from_bytes(launch["slots"][56:60], "little") == call["M"]
        assert int.from_bytes(launch["slots"][:8], "little") == ALIGNED.data_ptr()


def test_an_empty_grid_is_not_launched(tmp_path: Path) -> None:
    driver = FakeDriver()
    call = matvec_arguments(ALIGNED)
    aot.offer(write_kernels(tmp_path, [signature.specialize(matvec(), call)]), CPU, driver)
    matvec()[(0, 2)](**call)
    assert not driver.launches


def test_a_launch_without_a_kernel_is_tritons_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_now: list[Any] = []

    class Jitted:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: compiled_now.append((grid, args, options))

    monkeypatch.setattr(matvec(), "jitted", Jitted())
    driver = FakeDriver()
    aot.offer(write_kernels(tmp_path, [signature.specialize(matvec(), matvec_arguments(ALIGNED))]), CPU, driver)
    call = matvec_arguments(ALIGNED[1:257])
    with caplog.at_level(logging.WARNING):
        matvec()[(3, 1)](**call)
        matvec()[(3, 1)](**call)
    assert not driver.launches
    assert [grid for grid, _, _ in compiled_now] == [(3, 1)] * 2
    assert [r.getMessage() for r in caplog.records] == [
        f"no kernel compiled ahead is right for {signature.specialize(matvec(), call).describe()}: triton compiles it now"
    ]
    assert aot.missed() == 1


# ---------------------------------------------------------------- the index
def one_kernel(tmp_path: Path, **changes: Any) -> Path:
    return write_kernels(tmp_path, [signature.specialize(matvec(), matvec_arguments(ALIGNED))], **changes)


def test_a_corrupt_cubin_is_refused(tmp_path: Path) -> None:
    directory = one_kernel(tmp_path)
    file = directory / "kernels" / "0.cubin"
    data = bytearray(file.read_bytes())
    data[9] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"0\.cubin"):
        aot.offer(directory, CPU, FakeDriver())
    file.unlink()
    with pytest.raises(ArtifactError, match=r"0\.cubin"):
        aot.offer(directory, CPU, FakeDriver())
    assert jit.Entry.launcher is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"file": "../0.cubin"}, "kernels/"), ({"file": "/etc/passwd"}, "kernels/"),
        ({"sha256": 3}, "sha256"), ({"shared": -1}, "shared"),
        ({"num_warps": True}, "num_warps"), ({"architecture": "gfx942"}, "architecture 'gfx942'"),
        ({"arguments": ["x"]}, "arguments"), ({"arguments": {"x": 3}}, "argument x is 3, which"),
        ({"arguments": {"x": "tensordesc"}}, "argument x is 'tensordesc', which"), ({"arguments": {"x": "*bf16/1"}}, "argument x is"),
        ({"arguments": {"x": "=__import__('os')"}}, "argument x is"), ({"options": []}, "options"),
        ({"symbol": ""}, "symbol"),
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_index_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArtifactError, match=said.replace("(", r"\(")):
        cubins.read_index(one_kernel(tmp_path, **changes))


def test_an_index_of_another_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = one_kernel(tmp_path)
    file = directory / "kernels" / "index.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"schema_version": 3}))
    with pytest.raises(ArtifactError, match="schema version 3"):
        cubins.read_index(directory)
    file.write_text(json.dumps(content | {"schema_version": 1}))
    assert cubins.read_index(directory) == []
    assert "were written by an earlier version and are not used; export again" in caplog.text
    assert cubins.read_index(tmp_path / "elsewhere") == []


def test_kernels_of_other_sources_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert aot.offer(one_kernel(tmp_path, source="0" * 64), CPU, FakeDriver()) == 0
    assert "compiled from other sources than this runtime has, and are not used: matvec.matvec_kernel" in caplog.text
    assert not aot.offers(CPU)


def test_sources_are_more_than_text(tmp_path: Path) -> None:
    def tokens(source: str) -> list[str]:
        return jit.tokens_of(source)

    plain = tokens("def f(x):\n    y = x + 1\n    return y\n")
    assert tokens("def f(x):\n    # why\n    y = x + 1  # what\n\n    return y\n") == plain
    assert tokens("def f(x):\n    y = x + 2\n    return y\n") != plain
    assert tokens("def f(x):\n    if x:\n        y = 1\n    return y\n") != tokens(
        "def f(x):\n    if x:\n        y = 1\n        return y\n"
    )
    parts: dict[str, str] = {}
    jit.collect_source(matvec().fn, parts)
    assert "runtime.kernels.triton.codes.code_tiny" in parts, "helpers count"
    jit.collect_source(jit.Entry.known["codes._sum_parts"].fn, parts)
    from runtime.kernels.triton.matmul import matmul_kernel

    jit.collect_source(matmul_kernel.fn, parts)
    assert "runtime.kernels.triton.codes.dequantize_slice" in parts
    assert "0x5140" in parts["runtime.kernels.triton.tables:FIRST_PAIR"], "assembly too"
    assert {f"runtime.kernels.triton.codes.{name}" for name in ("code_plus", "code_slice")} <= set(parts), (
        "helpers of helpers too"
    )


@pytest.mark.parametrize(
    ("architecture", "runs"),
    [("sm_80", {80, 86, 89}), ("sm_86", {86, 89}), ("sm_90a", {90}), ("sm_100a", {100}), ("sm_90", {90})],
)
def test_which_gpu_runs_which_code(architecture: str, runs: set[int]) -> None:
    assert {c for c in (75, 80, 86, 89, 90, 100, 103, 120) if cubins.runs_on(architecture, c)} == runs


def test_kernels_for_another_gpu_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert aot.offer(one_kernel(tmp_path), CPU, FakeDriver(80)) == 0
    assert "kernels compiled ahead for sm_90a, and none for this GPU (sm_80)" in caplog.text


# ---------------------------------------------------------------- what tuning and the table see
def test_tuning_chooses_among_what_is_there(tmp_path: Path) -> None:
    layer = w4_layer()
    kernel, tensors = w4_tensors(layer)
    from runtime.kernels.triton import layout, matmul

    weight = layout.Weight(tensors["words"], tensors["scale"], None, layer.shape, 32, 4)
    x = torch.randn(5, 256).bfloat16()
    candidates = matmul.configurations(5, weight)
    assert len(candidates) > 2

    def launch(config: dict[str, Any]) -> None:
        with forced(config):
            matmul.matmul(x, weight)

    assert tuning.compiled_ahead(candidates, launch, CPU) == candidates, "no export is loaded"
    with jit.recording() as launches:
        launch(candidates[2])
    aot.offer(write_kernels(tmp_path, map(signature.of, launches)), CPU, FakeDriver())
    assert tuning.compiled_ahead(candidates, launch, CPU) == [candidates[2]]
    assert kernel.why_not(layer) is None, "triton is here, so that nothing is missing"


SCHEMES: list[tuple[TritonKernel, Scheme, str]] = [
    (W4A16Triton("cpu"), Scheme(GridScheme(4, "int", True, "group", 32)), "pack-quantized"),
    (W4A16Triton("cpu"), Scheme(GridScheme(3, "int", False, "group", 48)), "pack-quantized"),
    (W4A16Triton("cpu"), Scheme(GridScheme(4, "int", False, "tensor")), "packed"),
    (W8A16Triton("cpu"), Scheme(GridScheme(8, "int", False, "channel")), "int-quantized"),
    (Sparse24Triton("cpu"), Scheme(GridScheme(4, "int", False, "group", 64), None, "2:4"), "sparse24"),
    (W8A8Triton("cpu"), Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme(8, "int")), "int-quantized"),
    (
        W8A8Triton("cpu"),
        Scheme(GridScheme(8, "int", False, "tensor"), ActivationScheme(8, "int", False, False, "tensor")),
        "int-quantized",
    ),
    (
        W8A8Triton("cpu"),
        Scheme(GridScheme(8, "float", True, "channel"), ActivationScheme(8, "float")),
        "float-quantized",
    ),
    (BlockFloatTriton("cpu"), preset("NVFP4A16"), "nvfp4-pack-quantized"),
    (BlockFloatTriton("cpu"), preset("NVFP4"), "nvfp4-pack-quantized"),
    (BlockFloatTriton("cpu"), preset("MXFP4"), "mxfp4-pack-quantized"),
    (BlockFloatTriton("cpu"), preset("MXFP8A16"), "mxfp8-quantized"),
    (RowCodebookTriton("cpu"), Scheme(RowCodebook(3, None, 0.02)), "row_codebook"),
    (RowCodebookTriton("cpu"), Scheme(RowCodebook(4, 48)), "row_codebook"),
    *((KQuantTriton("cpu"), Scheme(KQuant(kind)), "k_quant") for kind in KINDS),
]


@pytest.mark.parametrize(("kernel", "scheme", "storage"), SCHEMES, ids=lambda value: getattr(value, "name", None))
def test_tensors_on_meta_are_like_those_that_prepare_makes(kernel: TritonKernel, scheme: Scheme, storage: str) -> None:
    from weight_cases import random_weight

    shape = (38, 768)
    tensors = formats.get(storage).pack(random_weight(scheme, shape))
    if scheme.activations is not None and scheme.activations.dynamic == "local":
        tensors |= {"input_global_scale": torch.ones(1)}
    elif scheme.activations is not None and not scheme.activations.dynamic:
        tensors |= {"input_scale": torch.ones(1).bfloat16(), "input_zero_point": torch.ones(1, dtype=torch.int8)}
    layer = Layer(ModuleEntry(scheme, storage, None), shape, torch.bfloat16, CPU)
    made, blank = kernel.prepare(tensors, layer), kernel.blank(layer)
    kept = {name: tensor for name, tensor in made.items() if name in blank}
    assert {n: (t.shape, t.dtype) for n, t in blank.items()} == {n: (t.shape, t.dtype) for n, t in kept.items()}
    assert set(made) - set(blank) <= {"weight_bitmap"}
    with jit.recording() as real:
        kernel.compute(torch.zeros(3, 768).bfloat16(), made, layer, None)
    with jit.recording() as imagined:
        kernel.compute(torch.zeros(3, 768, dtype=torch.bfloat16, device="meta"), blank, layer, None)
    assert [signature.of(launch) for launch in real] == [signature.of(launch) for launch in imagined]
    assert real


def test_every_candidate_is_recorded(tiny_artifact: Path) -> None:
    from export.triton_aot import plan
    from runtime.checkpoint.artifact import Artifact
    from runtime.engines.blueprint import Blueprint

    def find(capability: int, every: bool) -> Any:
        return plan.find(
            Blueprint(Artifact(tiny_artifact), torch.device("meta"), "auto", None, False).module, capability, every
        )

    few, many, old = find(90, False), find(90, True), find(80, True)
    assert few.engine is None
    assert set(few.kernels.values()) == {"w4a16-triton"}
    assert set(few.variants) < set(many.variants)
    names = {variant.kernel for variant in many.variants}
    assert names >= {
        "matvec.matvec_kernel", "matmul.matmul_kernel", "matmul.dequantize_kernel",
        "fused.rms_norm_kernel", "fused.swiglu_kernel", "rotary_store.rotary_store_kernel", "paged_attention.split_kernel",
        "paged_attention.join_kernel", "chunk_attention.chunk_kernel",
    }  # fmt: skip
    blocks = [
        {(v.arguments[-4][1], v.arguments[-3][1]) for v in found.variants if v.kernel == "matmul.matmul_kernel"}
        for found in (many, old)
    ]
    assert blocks[0] != blocks[1], "an older GPU has candidates of its own"
    assert gpu.capability(torch.device("meta")) == (9, 0), "nothing is left assumed"
    for variant in many.variants:  # a step's positions and slots may lie anywhere
        assert not any(code.endswith("/16") for name, code in variant.arguments if name in ("positions", "slots"))


def test_scales_of_block_floats_have_no_sign() -> None:
    """Tensor cores of sm_100 would leave it out."""
    from weight_cases import random_weight

    scheme, shape = preset("NVFP4A16"), (64, 192)
    tensors = formats.get("nvfp4-pack-quantized").pack(random_weight(scheme, shape))
    layer = Layer(ModuleEntry(scheme, "nvfp4-pack-quantized", None), shape, torch.bfloat16, CPU)
    BlockFloatTriton("cpu").prepare(tensors, layer)
    tensors["weight_scale"].view(torch.uint8)[3, 1] |= 128
    with pytest.raises(CompressError, match="NVFP4 scales must not be negative"):
        BlockFloatTriton("cpu").prepare(tensors, layer)


class Witness:
    """Sees every launch and computes nothing: results are zeros."""

    def __init__(self) -> None:
        self.seen: dict[Variant, None] = {}

    def launch(self, kernel: jit.Entry, grid: Sequence[int], arguments: dict[str, Any]) -> bool:
        self.seen[signature.specialize(kernel, arguments)] = None
        for name in ("out", "total", "codes"):
            if name in arguments and arguments[name] is not arguments.get("x"):
                arguments[name].zero_()
        return True


@pytest.mark.parametrize("fuse", [True, False], ids=["joined", "apart"])
def test_the_engine_launches_what_is_compiled(fuse: bool, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the addresses and strides that its tensors really have; what is compiled was found on meta."""
    from export.triton_aot import plan
    from runtime import kernels as table
    from runtime.api.model import Model
    from runtime.checkpoint.artifact import Artifact
    from runtime.engines.blueprint import Blueprint
    from runtime.engines.cuda import CudaEngine, ops
    from runtime.engines.llama_structure import Program, read_program
    from runtime.kernels import Choice
    from runtime.layers.compressed_linear import CompressedLinear

    kernel = W4A16Triton("cpu")
    choice = Choice(kernel, kernel, kernel)
    torch_engine = Blueprint(Artifact(tiny_artifact), CPU, "reference", torch.bfloat16, False).build()
    for module in torch_engine.module.modules():
        if isinstance(module, CompressedLinear):
            module.prepare(choice=choice)
    monkeypatch.setattr(table, "find", lambda layer, kernels="auto": choice)
    program = read_program(torch_engine.module, fuse)
    assert isinstance(program, Program)
    engine = CudaEngine(torch_engine, program, computing=ops.kernels())
    witness = Witness()
    monkeypatch.setattr(jit.Entry, "launcher", witness.launch)
    model = Model(engine, None, Artifact(tiny_artifact), frozenset())
    for count, length in ((1, 2), (2, 9), (5, 20), (1, 90), (70, 3)):  # steps and prompts of every class of rows
        model.generate([[7 + i % 9] * (length + i % 3) for i in range(count)], max_new_tokens=3, ignore_eos=True)
    model.logits(torch.zeros(3, 40, dtype=torch.long))
    names = {variant.kernel for variant in witness.seen}
    assert names >= {
        "matvec.matvec_kernel", "matmul.matmul_kernel", "fused.rms_norm_kernel", "chunk_attention.chunk_kernel",
        "fused.swiglu_kernel", "rotary_store.rotary_store_kernel", "paged_attention.split_kernel", "paged_attention.join_kernel",
    } - ({"fused.swiglu_kernel"} if not fuse else set())  # fmt: skip
    blueprint = Blueprint(Artifact(tiny_artifact), torch.device("meta"), "auto", torch.bfloat16, False)
    found = plan.find(blueprint.module, 90, every=False).variants
    alone = [call.describe() for call in witness.seen if not any(variant.serves(call) for variant in found)]
    assert not alone


# ---------------------------------------------------------------- processes of their own
def test_without_triton(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(HERE), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(HERE / "without_triton.py"), str(tmp_path)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "done"


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a CUDA driver that only writes down."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no C compiler for Linux")
    folder = tmp_path_factory.mktemp("fake-cuda")
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([*command, str(HERE / "fake_cuda.c")], check=True, capture_output=True)
    (folder / "libcuda.so").symlink_to(library.name)
    return folder


@pytest.mark.slow
def test_launched_as_triton_launches(fake_cuda: Path, tmp_path: Path) -> None:
    """The same grid, block, shared memory, stream and bytes of arguments from triton's own launcher and from ours."""
    import sysconfig

    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        pytest.skip("triton's launcher needs Python.h")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(tmp_path), "TRITON_LIBCUDA_PATH": str(fake_cuda), "LD_LIBRARY_PATH": str(fake_cuda),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(HERE / "launch_twice.py"), str(fake_cuda)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.pop("by") for line in lines] == ["triton", "ours"] * 3
    for theirs, ours in zip(lines[::2], lines[1::2], strict=True):
        assert ours == theirs
    assert lines[0]["shared"] > 48 << 10, "one of them asks for more than every kernel may have"
    assert lines[0]["room"] == 232448 - 1024
    assert lines[2]["room"] == -1
    assert len(lines[0]["arguments"]) > 8


def test_the_driver_says_what_failed(fake_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CudaDriver(str(fake_cuda / "libcuda.so.1"))
    with pytest.raises(CompressError, match="cuModuleLoadData"):
        driver.load(0, b"no ELF", "kernel", 0, 128)
    with pytest.raises(CompressError, match="cuModuleGetFunction"):
        driver.load(0, b"\x7fELF", "absent", 0, 128)
    with pytest.raises(CompressError, match="2048"):
        driver.load(0, b"\x7fELF", "kernel", 0, 2048)
    with pytest.raises(CompressError, match="300000"):
        driver.load(0, b"\x7fELF", "kernel", 300000, 128)
    with pytest.raises(CompressError, match="missing"):
        CudaDriver(str(fake_cuda / "missing.so"))


def test_a_variant_compiles_to_what_the_launch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written into an index and read again compiles to the same PTX, and takes the arguments that it says."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    launch = gpu_launches.record(gpu_launches.hot_launches()["swiglu"][0])[0]
    variant = signature.of(launch)
    again = Variant.read(
        variant.kernel, json.loads(json.dumps(dict(variant.arguments))), dict(variant.options), "index.json"
    )
    assert again == variant
    kernel = compile_variant(again, 90)
    assert kernel.metadata.enable_fp_fusion, "left to the default of this Triton"
    ptx = kernel.asm["ptx"]
    assert ptx == gpu_launches.build(launch, 90).asm["ptx"]
    declared = [line.split()[1] for line in ptx.splitlines() if line.strip().startswith(".param")]
    assert declared == [".u64" if size == 8 else ".u32" for size in variant.sizes] + [".u64"] * 2
