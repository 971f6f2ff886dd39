"""The C kernels under the compiler's sanitizers: calls that are recorded here, whole steps too, are repeated by a program in C."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import products
import pytest
import torch
from compressed_models import SCHEMES
from llama_engines import model_of as llama
from llama_engines import native as engine_of
from program_families import FAMILIES, FLOAT8, compressed, model_of
from recorded_calls import Recorder, recorded
from weight_cases import int_scheme

from runtime.engines.base import Chunk
from runtime.engines.native import take_over
from runtime.engines.native.engine import NativeEngine
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.input_transform import InputTransform
from runtime.formats.scheme import Scheme
from runtime.formats.ternary_dictionary import TernaryDictionary, word_table
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import CKernel
from runtime.kv_cache.policy.policy import Policy
from runtime.system import instruction_sets, native

REPLAY = Path(__file__).with_name("replay.c")
COMPILER = native.find_compiler()
FUNCTIONS = ["linear_run", "decoder_step", "decoder_copy", "decoder_tokens"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = instruction_sets.available()
# Compilers take minutes over vector code with every check in it: it gets those of addresses, as calls, and of threads. Undefined
# behaviour is looked for in the portable build, so not in what only vectors have (simd_*.h, tiles of several rows, dfloat11.h, ternary.h).
SANITIZERS = (
    (LEVELS[0], "address", ("--param", "asan-instrumentation-with-call-threshold=0")),
    (LEVELS[0], "thread", ()),
    (instruction_sets.PORTABLE, "address,undefined,float-cast-overflow", ()),
)
POLICIES = (
    {"keys": "int4", "values": "int4", "recent": 64},
    {"keys": "int8", "values": "int8", "recent": 0},
    {"keys": "plain", "values": "int2", "recent": 70},
    {"keys": "int2", "values": "fp8", "recent": 1, "prefix": 64},
    {"keys": "fp8", "values": "plain", "recent": 64},
    {"select": {"method": "quest", "tokens": 130, "skip_layers": 0, "recent": 1}},
    {"keys": "int4", "values": "fp8", "recent": 64, "select": {"method": "quest", "ratio": 0.3, "skip_layers": 0}},
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # compilers take minutes over every tile with checks in it
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
]


def build(folder: Path, source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    command = [
        *COMPILER.split(),
        "-std=c11",
        "-g1",
        *flags,
        str(source),
        "-o",
        str(folder / "program"),
        "-lm",
        "-pthread",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)


def run(folder: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    command = [folder / "program", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


# ---------------------------------------------------------------- what is recorded
def record_products(recorder: Recorder, found: ctypes.CDLL) -> None:
    number = 0
    for at, (rows, columns) in enumerate(((1, 32), (16, 64), (37, 216), (83, 96))):
        made: list[tuple[library.Linear, object]] = []
        for bits in range(2, 9):
            number += 1
            case = products.case(
                "w4" if bits <= 4 else "w8", int_scheme(bits, bool(number % 2), 32), (rows, columns), torch.bfloat16
            )
            bias = torch.randn(rows)
            made.append((case.layout.linear(case.prepared, case.layer, bias), (case, bias)))
        for scheme in products.FLOATS.values() if columns % 32 == 0 else ():
            case = products.case("e2m1", scheme, (rows, columns), torch.bfloat16)
            made.append((case.layout.linear(case.prepared, case.layer, None), case))
        for scheme in products.TRELLISES[:2] if columns in (96, 216) else ():
            wide = columns // scheme.weights.group_size * scheme.weights.group_size
            case = products.case("t", scheme, (rows, wide), torch.bfloat16)
            made.append((case.layout.linear(case.prepared, case.layer, None), case))
        for scheme in products.ROW_CODEBOOKS[at:3]:
            wide = products.whole(scheme, columns)
            case = products.case("c", scheme, (rows, wide), torch.bfloat16)
            made.append((case.layout.linear(case.prepared, case.layer, None), case))
        for kind in list(products.K_QUANTS)[at::4]:
            case = products.case("k", products.K_QUANTS[kind], (rows, 256), torch.bfloat16)
            made.append((case.layout.linear(case.prepared, case.layer, None), case))
        case = products.case(
            "s24", int_scheme(4, True, "channel", "2:4"), (rows, columns), torch.float32, storage="sparse24"
        )
        made.append((case.layout.linear(case.prepared, case.layer, None), case))
        for dtype in (*FLOATS, torch.float8_e4m3fn):
            weight, scale = torch.randn(rows, columns).to(dtype), torch.rand(rows) if dtype.itemsize == 1 else None
            made.append((products.dense(weight, scale=scale), (weight, scale)))
        wide = [
            (Scheme(DFloat11(n)), columns + 1024 * (n - 2)) for n in (2, 3, 4)
        ]  # units of 256 columns, and sections
        word_table.cache_clear()  # only what is made here is recorded
        wide += [(Scheme(TernaryDictionary()), columns + 2048), (Scheme(TernaryDictionary(0.5)), columns)]
        stored = [(products.MXFP8, columns)] if columns % 32 == 0 else []
        stored += [(each, -(-columns // size) * size) for size, own in products.ROUNDED.items() for each in own]
        for scheme, width in stored + wide:
            layer, _ = products.linear(scheme, (rows, width))
            kernel = layer.prepare().decode
            assert isinstance(kernel, CKernel)
            made.append((kernel.linear(layer._tensors(), layer.layer, None), layer))
        for linear, _ in made:
            every = (1, 2, 3) if linear.kind and not linear.rounding.kind else (linear.digits,)
            for digits, batch in itertools.product(every, (1, 5, 9) if linear.kind else (1, 5, 9, 29)):
                number += 1
                linear.digits = digits
                recorder.label = f"kind {linear.kind} {rows} x {linear.columns}, {digits} digits"
                x = torch.randn(batch, linear.columns).to(FLOATS[number % 3])
                y = torch.full((batch, rows), float("nan"), dtype=x.dtype)
                memory = recorder.scratch(found.linear_memory(ctypes.byref(linear), batch)).data_ptr()
                kind = library.TYPES[x.dtype]
                found.linear_run(
                    ctypes.byref(linear), x.data_ptr(), kind, batch, y.data_ptr(), kind, memory, 1 + number % 4
                )


def record_steps(recorder: Recorder, engine: NativeEngine, length: int) -> None:
    """A prompt and a short one beside it, a token of each, a chain and a tree; what of the tree is right stays."""
    chance, retention = torch.Generator().manual_seed(length), engine.retention(length - 3)
    count = engine.vocab_size

    def chunk(start: int, size: int, pages: range, **kinds: object) -> Chunk:
        tokens = torch.randint(0, count, (size,), generator=chance).tolist()
        return Chunk(tokens, start, pages, retention=retention, **kinds)  # type: ignore[arg-type]

    pool = engine.new_pages(-(-(length + 20) // engine.page_size) + 1)
    for tensor in pool.tensors:
        tensor.fill_(float("nan"))
    long, short = range(1, pool.count), range(1)
    steps = [
        [chunk(0, length - 3, long), chunk(0, 5, short)],
        [chunk(length - 3, 1, long), chunk(5, 1, short)],
        [chunk(length - 2, 2, long, outputs=2), chunk(6, 4, short, outputs=4)],
    ]
    for number, chunks in enumerate(steps):
        torch.set_num_threads(4 - number)
        engine.verify(pool, chunks)
    if engine.trees:
        tree = chunk(length, 6, long, outputs=6, parents=[-1, 0, 0, 1, 2, 4])
        engine.verify(pool, [tree, chunk(10, 1, short)])
        engine.keep(pool, tree, [0, 2, 4, 5])


def record_evictions(recorder: Recorder, engine: NativeEngine) -> None:
    """A prompt of whose layers and heads different numbers of tokens stay, some steps after that, and a tree; then all of it again."""
    chance, length = torch.Generator().manual_seed(5), 300
    text = torch.randint(0, engine.vocab_size, (length + 40,), generator=chance).tolist()
    pool, retention = engine.new_pages(24), engine.retention(length)
    assert retention is not None
    pages, start = [*range(8)], 0
    for tensor in pool.tensors:
        tensor.fill_(float("nan"))
    while start < len(text):
        end = min(start + 67, retention.boundary or len(text), len(text)) if start < length else start + 1
        engine.read(pool, [Chunk(text[start:end], start, pages, retention=retention)])
        start = end
        if start == retention.boundary:
            into = [page for page in range(24) if page not in pages][:8]
            pages = into if engine.evict(pool, retention, pages, into) else pages
    tree = Chunk([1, 2, 3, 4], start, pages, outputs=4, parents=[-1, 0, 0, 2], retention=retention)
    engine.verify(pool, [tree])
    engine.keep(pool, tree, [0, 2, 3])


def record_engines(recorder: Recorder, quantized: bool) -> None:
    """`quantized`: each model of int4 codes too."""
    for name in FAMILIES:
        model = model_of(name)
        kinds = {"dense": model, "int4": compressed(model)[0]} if quantized and "," not in name else {"dense": model}
        if name == "Llama":
            for label, scheme in (("transformed", SCHEMES["pack-quantized"]), ("transformed fp8", FLOAT8)):
                kinds[label] = compressed(model, replace(scheme, transform=InputTransform("random")))[0]
            kinds["nvfp4"] = compressed(
                model_of(name, hidden_size=96, intermediate_size=128), products.FLOATS["nvfp4"]
            )[0]
        if name in ("Llama", "GptOss"):
            kinds["fp8"] = compressed(model, FLOAT8)[0]
        for kind, small in kinds.items():
            recorder.label = f"{name}, {kind}"
            record_steps(recorder, engine_of(small), 67)
    for number, policy in enumerate(POLICIES):
        size, dtype = (32, 48, 80)[number % 3], FLOATS[number % 3]
        engine = engine_of(llama("grouped", head_dim=size, num_hidden_layers=1, max_position_embeddings=1024).to(dtype))
        recorder.label = f"{policy}"
        record_steps(recorder, engine, 590)
        assert engine.hold(Policy.parse(policy)) is None
        record_steps(recorder, engine, 590)
    for storage in ({}, {"keys": "int4", "values": "int4", "recent": 64, "prefix": 5}):
        engine = engine_of(llama("grouped", head_dim=32, max_position_embeddings=1024))
        budgets = {"layers": {"share": "pyramid", "beta": 3}, "heads": "adaptive", "tokens": 170, "interval": 20}
        recorder.label = f"evicted from, {storage}"
        assert engine.hold(Policy.parse({"evict": {"score": "defensive", **budgets}, **storage})) is None
        record_evictions(recorder, engine)


@pytest.fixture(scope="module")
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """Folder with the calls of an instruction set and what makes them, and how many they are."""
    level = request.param
    found, folder = library.load(level), tmp_path_factory.mktemp("recording")
    assert found is not None
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, recorded(found, FUNCTIONS, folder / "calls") as recorder:
        patch.setattr(library, "load", lambda: found)
        patch.setattr(library, "tensor_of", recorder.scratch)
        patch.setattr(take_over, "disproof", lambda *_: None)  # steps of engines beside their modules, as they are made
        patch.setattr(
            NativeEngine,
            "_memory",
            lambda _, decoder, rows: recorder.scratch(found.decoder_memory(ctypes.byref(decoder), rows)),
        )
        try:
            record_products(recorder, found)
            record_engines(recorder, level != instruction_sets.PORTABLE)
        finally:
            torch.set_num_threads(threads)
    (folder / "calls.h").write_text(recorder.dispatch())
    yield folder, recorder.count
    (folder / "calls").unlink()


@pytest.mark.parametrize(("recording", "sanitizer", "more"), SANITIZERS, indirect=["recording"])
def test_nothing_is_found(
    request: pytest.FixtureRequest, recording: tuple[Path, int], sanitizer: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    folder, count = recording
    level = request.node.callspec.params["recording"]
    trial = tmp_path / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    flag = f"-fsanitize={sanitizer}"
    if build(tmp_path, trial, flag).returncode or run(tmp_path).returncode:
        pytest.skip(f"the compiler has no library for {flag} that runs here")
    more = more if build(tmp_path, trial, flag, *more).returncode == 0 else ()  # only GCC has it
    flags = ["-O1", "-ffp-contract=off", flag, *more, "-fno-sanitize-recover=all", *instruction_sets.tunings(level)[0]]
    named = ["-DSANITIZED", f'-DKERNELS="{library.SOURCE}"', f'-DCALLS="{folder / "calls.h"}"']
    built = build(tmp_path, REPLAY, *flags, *named)
    assert built.returncode == 0, built.stderr[-2000:]
    done = run(tmp_path, folder / "calls")
    assert done.returncode == 0, (done.stderr or done.stdout)[-3000:]
    assert done.stdout.endswith(f"{count} calls\n")
