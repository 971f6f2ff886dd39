"""`--target triton`: kernels compiled here for GPUs that are not here, and what of them can be proven without one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import gpu_launches

import export
import runtime
from export.run import Exported, parse_options
from export.source import Source
from export.triton_aot import check, plan
from export.triton_aot.build import Task, build
from export.triton_aot.options import TritonOptions
from export.triton_aot.target import TritonTarget
from runtime.checkpoint.artifact import Artifact
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.kernels.triton import aot, jit, signature
from runtime.kernels.triton.cubins import Cubin, read_cubin, read_index
from runtime.kv_cache.policy.policy import Policy
from runtime.system.self_hash import sealed_json

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def exported(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The tiny artifact for one GPU, the first configuration of each kernel; read only."""
    output = tmp_path_factory.mktemp("triton") / "tiny-triton"
    return export.export(tiny_artifact, "triton", output, gpus="90", configs="default", quiet=True)


@pytest.fixture(autouse=True)
def nothing_offered() -> Iterator[None]:
    yield
    aot.withdraw()


def index(path: Path) -> list[dict[str, Any]]:
    content = json.loads((path / "kernels" / "index.json").read_text())
    assert content["schema_version"] == 2
    assert content["triton"]
    found: list[dict[str, Any]] = content["kernels"]
    return found


def copied(exported: Exported, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported.path, tmp_path / "copy"))


# ---------------------------------------------------------------- the export
@pytest.mark.slow
def test_the_artifact_and_a_kernel_for_every_launch(exported: Exported, tiny_artifact: Path) -> None:
    assert Artifact(exported.path).verify() == Artifact(tiny_artifact).verify(), "the artifact is in it, file by file"
    kernels = index(exported.path)
    assert (
        len(kernels) == exported.facts["gpus"]["sm_90"]["kernels"] == len(list(exported.path.glob("kernels/*.cubin")))
    )
    assert {entry["architecture"] for entry in kernels} == {"sm_90a"}
    assert {entry["kernel"] for entry in kernels} >= {
        "matvec.matvec_kernel", "matmul.matmul_kernel", "paged_attention.split_kernel", "chunk_attention.chunk_kernel",
        "fused.rms_norm_kernel", "rotary_store.rotary_store_kernel",
    }  # fmt: skip
    for entry in kernels:
        assert entry["registers"] >= 8
        assert entry["scratch_pointers"] == 2, "global and profile scratch, as Triton 3.6 to 3.9 pass them"
    found = exported.verification
    assert found is not None
    assert found.metrics["kernels"] == len(kernels)
    assert found.metrics["compiled_again"] == found.metrics["same_bytes"] == 3
    assert found.metrics["logit_difference"] == 0.0
    if not torch.cuda.is_available():
        assert found.notes == ["there is no GPU here: the kernels were compiled and read back, and none was run"]
    manifest = json.loads((exported.path / "export.json").read_text())
    assert manifest["triton"]["configs"] == "default"
    assert manifest["triton"]["engine"] == "the lean GPU engine"
    assert manifest["triton"]["layers_on_other_kernels"] == {}
    assert 'runtime.load("tiny-triton", device="cuda")' in (exported.path / "README.md").read_text()


def test_it_loads_as_the_artifact_does(exported: Exported, tiny_artifact: Path) -> None:
    ids = torch.tensor([[1, 5, 9, 200]])
    ours, theirs = (runtime.load(path, device="cpu").logits(ids) for path in (exported.path, tiny_artifact))
    assert torch.equal(ours, theirs)


def test_no_path_of_this_machine_is_in_a_cubin(exported: Exported) -> None:
    for file in exported.path.glob("kernels/*.cubin"):
        data = file.read_bytes()
        for text in (os.sep + "tmp", str(Path(jit.__file__).parent), ".py"):
            assert text.encode() not in data, file


def test_the_runtime_finds_a_kernel_for_every_layer(exported: Exported) -> None:
    """As on a machine with such a GPU: what the table asks before it chooses a kernel, and what the engine launches."""
    from runtime.engines.blueprint import Blueprint

    class Driver:
        device_type = "cpu"

        def capability(self, device: int) -> int:
            return 90

        def current(self) -> tuple[int, int]:
            return 0, 0

    assert aot.offer(exported.path, CPU, Driver()) == len(index(exported.path))  # type: ignore[arg-type]
    model = Blueprint(Artifact(exported.path), torch.device("meta"), "auto", None, False).module
    assert aot.missing(lambda: _walk(model), CPU) is None


def _walk(model: Any) -> None:
    from runtime.kernels.triton import gpu

    with gpu.assuming(90), torch.inference_mode():
        plan.prepare(model)
        plan.call_layers(model)
        plan.call_decoder(model)


@pytest.mark.parametrize(("count", "choices"), [(5, 2), (6, 6)])
def test_every_launch_of_a_mixture_is_found(count: int, choices: int, tmp_path: Path) -> None:
    """In a step of any number of tokens, of a model of 4-bit experts."""
    from transformers import MixtralConfig

    from runtime.formats.quantization_config import ModuleEntry
    from runtime.formats.scheme import GridScheme, Scheme
    from runtime.kernels.triton import experts, routing
    from runtime.kernels.triton.layout import Stack
    from runtime.layers.compressed_linear import install
    from runtime.modeling.experts import find_fused, unfuse
    from runtime.modeling.skeleton import build_skeleton, read_config

    config = MixtralConfig(
        hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=256, num_local_experts=count, num_experts_per_tok=choices,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = build_skeleton(read_config(tmp_path), torch.bfloat16)
    (name,) = find_fused(model)
    unfuse(model)
    scheme = Scheme(GridScheme(4, "int", True, "group", 32))
    layers = [
        key
        for key, module in model.named_modules()
        if key.startswith(f"{name}.") and isinstance(module, torch.nn.Linear)
    ]
    install(model, dict.fromkeys(layers, ModuleEntry(scheme, "pack-quantized")))
    found = plan.find(model, 90, every=False)
    assert found.engine is None
    assert set(found.kernels.values()) == {"w4a16-triton"}

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def stack(n: int, k: int) -> Stack:
        words = meta(count, -(-k // 128), n, 16, dtype=torch.int32)
        return Stack(words, meta(count, k // 32, n), None, (n, k), 32, 4)

    for tokens in (*range(1, 150), 511, 512, 2048):
        with jit.recording() as launches:
            chosen, weights = routing.route(meta(tokens, count), choices, choices < count)  # all: a softmax
            experts.experts(meta(tokens, 128), chosen, weights, stack(128, 128), stack(128, 64))
        for launch in launches:
            wanted = signature.of(launch)
            assert any(variant.serves(wanted) for variant in found.variants), (tokens, wanted.describe())


# ---------------------------------------------------------------- what is read out of a binary
def test_what_is_wrong_with_a_binary_is_said(exported: Exported, tmp_path: Path) -> None:
    from dataclasses import replace

    cubin = read_index(exported.path)[0]
    file = exported.path / "kernels" / cubin.file
    check.check(file, cubin)
    with pytest.raises(CompressError, match=r"sm_90a.*sm_80"):
        check.check(file, replace(cubin, architecture="sm_80"))
    with pytest.raises(CompressError, match=r"\bother\b"):
        check.check(file, replace(cubin, symbol="other"))
    with pytest.raises(CompressError, match=r"\(offset, bytes\)"):
        check.check(file, replace(cubin, scratch_pointers=1))
    fewer = signature.Variant(cubin.variant.kernel, cubin.variant.arguments[1:], cubin.variant.options)
    with pytest.raises(CompressError, match=r"\(offset, bytes\)"):
        check.check(file, replace(cubin, variant=fewer))
    for wrong in (b"", b"\x7fELF\x02\x01" + bytes(80), file.read_bytes()[:200]):
        (tmp_path / "x.cubin").write_bytes(wrong)
        with pytest.raises(CompressError, match=r"x\.cubin"):
            check.check(tmp_path / "x.cubin", cubin)


def test_damage_is_refused(exported: Exported, tmp_path: Path) -> None:
    class Driver:
        device_type = "cpu"

        def capability(self, device: int) -> int:
            return 90

        def current(self) -> tuple[int, int]:
            return 0, 0

    directory = copied(exported, tmp_path)
    file = directory / "kernels" / index(directory)[0]["file"]
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match="SHA-256"):
        aot.offer(directory, CPU, Driver())  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="is corrupt"):
        read_cubin(directory, read_index(directory)[0])


def test_what_was_not_run_on_a_gpu_is_said(
    exported: Exported, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from export.target import Job
    from export.verify import Probe

    cubins = read_index(exported.path)
    job = Job(Source(tiny_artifact), TritonOptions(gpus="80,90"), exported.path, progress=None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert check.compare_on_gpu(job, cubins, {}) == ["the GPU here is sm_75: no kernel was run"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    logits = torch.randn(1, 4, 9)
    reference = Probe([[1]], torch.zeros(1, 4, dtype=torch.long), logits, [[1]])
    monkeypatch.setattr(check, "gpu_logits", lambda job: (reference, logits, 2))
    metrics: dict[str, Any] = {}
    notes = check.compare_on_gpu(job, cubins, metrics)
    assert notes[0] == "kernels for sm_80 were not run: the GPU here is sm_90"
    assert notes[1].startswith("2 launches found no kernel compiled ahead")
    assert metrics["gpu_kl"] == 0.0
    monkeypatch.setattr(check, "gpu_logits", lambda job: (reference, logits.flip(-1), 0))
    with pytest.raises(CompressError, match=r"\bKL\b"):
        check.compare_on_gpu(job, cubins, metrics)


# ---------------------------------------------------------------- compiling
@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_architectures_and_errors(tmp_path: Path) -> None:
    """One small kernel for three GPUs in one process, and one that does not compile."""
    launch = gpu_launches.record(gpu_launches.hot_launches()["swiglu"][0])[0]
    variant = signature.of(launch)
    no_power_of_two = tuple((name, "=3" if name == "BLOCK" else code) for name, code in variant.arguments)
    wrong = signature.Variant(variant.kernel, no_power_of_two, variant.options)
    seen: list[Any] = []
    matrix = signature.of(gpu_launches.record(gpu_launches.hot_launches()["w4a16 512"][0], 100)[0])
    tasks = [*(Task(variant, capability) for capability in (80, 90, 100)), Task(wrong, 90), Task(matrix, 100)]
    built = build(tasks, seen.append)
    assert [one.task for one in built] == tasks
    assert len(seen) == 5
    assert [one.entry["architecture"] for one in built[:3]] == ["sm_80", "sm_90a", "sm_100a"]
    assert len({one.cubin for one in built[:3]}) == 3
    assert all(one.entry["spill_bytes"] == 0 and one.entry["num_warps"] == 4 and not one.error for one in built[:3])
    assert built[3].error
    assert not built[3].cubin
    one, entry = built[4], built[4].entry  # tensor memory brings functions of the compiler's along
    assert (entry["symbol"], entry["scratch_pointers"]) == ("matmul_kernel", 2)
    (tmp_path / "x.cubin").write_bytes(one.cubin)
    check.check(
        tmp_path / "x.cubin",
        Cubin(matrix, "x.cubin", "", "sm_100a", "", entry["symbol"], entry["shared"], entry["num_warps"], 2),
    )


def test_a_kernel_that_compiles_to_something_else_is_refused(
    exported: Exported, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from export.target import Job
    from export.triton_aot.build import Built
    from runtime.system.progress import ProgressReporter

    cubins = read_index(exported.path)
    listed = {entry["kernel"]: entry["ptx_sha256"] for entry in reversed(index(exported.path))}
    job = Job(Source(tiny_artifact), TritonOptions(gpus="90"), exported.path, ProgressReporter(quiet=True))

    def again(ptx: dict[str, str]) -> Any:
        return lambda tasks, done: [Built(task, b"other", {"ptx_sha256": ptx[task.variant.kernel]}) for task in tasks]

    metrics: dict[str, Any] = {}
    monkeypatch.setattr(check, "build", again(listed))
    (note,) = check.compile_again(job, cubins, metrics)
    assert note.startswith("NVIDIA's assembler made other binaries of the same PTX for 3 kernels")
    assert metrics == {"compiled_again": 3, "same_bytes": 0}
    monkeypatch.setattr(check, "build", again(dict.fromkeys(listed, "0")))
    with pytest.raises(CompressError, match=r"\.cubin"):
        check.compile_again(job, cubins, metrics)


def test_every_kernel_is_compiled_ahead_but_those_of_caches() -> None:
    for module in (*jit.MODULES, "runtime.kv_cache.kernels.triton_attention"):
        import_module(module)
    others = {
        k.fn.__module__.rpartition(".")[0] for k in jit.Entry.known.values() if k.fn.__module__ not in jit.MODULES
    }
    assert others == {"runtime.kv_cache.kernels"}, "whatever else has kernels belongs into jit.MODULES"


def with_policy(artifact: Path, folder: Path, policy: Policy) -> Source:
    """A copy of an artifact that says so."""
    path = Path(shutil.copytree(artifact, folder))
    manifest = json.loads((path / "compress.json").read_text())
    (path / "compress.json").write_text(sealed_json(manifest | {"kv_cache": policy.resolved()}))
    return Source(path)


def test_kernels_of_stored_pages_are_compiled(tiny_artifact: Path, tmp_path: Path) -> None:
    options = TritonOptions(gpus="90")
    source = with_policy(tiny_artifact, tmp_path / "kivi", Policy.parse("kivi"))
    plain, found = plan.launches(Source(tiny_artifact), options, 90), plan.launches(source, options, 90)
    assert found.engine is None
    assert plan.cache_note(source) is None
    added = {variant.kernel for variant in set(found.variants) - set(plain.variants)}
    assert added == {
        "stored_attention.stored_split_kernel",
        "page_store.page_store_kernel",
        "paged_attention.join_kernel",
    }
    assert set(plain.variants) <= set(found.variants), "what kv_cache=False launches is there"


def test_a_policy_comes_along_and_what_is_not_compiled_for_it_is_said(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from export.target import Job
    from export.triton_aot import target
    from runtime.kernels.triton import tuning
    from runtime.kv_cache.policy.policy import choose_policy
    from runtime.system.progress import ProgressReporter

    policy, options = Policy.parse({"keys": "bitmap", "values": "int4"}), TritonOptions(gpus="90")
    source = with_policy(tiny_artifact, tmp_path / "bitmap", policy)
    plain = plan.launches(Source(tiny_artifact), options, 90)
    whole, by_itself = plan.call_layers, []
    monkeypatch.setattr(plan, "call_layers", lambda model: by_itself.append(tuning._every.get()) or whole(model))
    found = plan.launches(source, options, 90)
    assert plain.engine is None
    assert found.engine == "the cache's policy says to store keys as bitmap"
    assert set(plain.variants) <= set(found.variants), "what kv_cache=False launches is there"
    assert by_itself == [False, True], "and what tuning may choose for each layer as transformers' modules call it"

    tasks: list[Task] = []
    monkeypatch.setattr(target, "compile_all", lambda job, given: tasks.extend(given) or [])
    (tmp_path / "out").mkdir()
    job = Job(source, options, tmp_path / "out", ProgressReporter(quiet=True))
    TritonTarget().write(job)
    assert [task.variant for task in tasks] == found.variants
    assert job.progress.warnings == [plan.CACHE]  # type: ignore[attr-defined]
    assert job.facts["cache"] == plan.CACHE
    assert job.facts["engine"] == "transformers' modules (the cache's policy says to store keys as bitmap)"
    assert choose_policy(None, Artifact(job.folder), lambda: source.config) == policy


# ---------------------------------------------------------------- requests
@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ("80,90", ["sm_80", "sm_90"]), (90, ["sm_90"]), (["sm_100", 80], ["sm_80", "sm_100"]), ("SM_90, 90", ["sm_90"]),
        ([80], ["sm_80"]),
    ],
    ids=str,
)  # fmt: skip
def test_gpus_are_named_in_many_ways(given: Any, gpus: list[str]) -> None:
    assert parse_options(TritonTarget(), {"gpus": given}).gpus == gpus
    assert TritonOptions().gpus == ["sm_80", "sm_90", "sm_100"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": "75"}, "gpus must be among sm_80, sm_90, sm_100"), ({"gpus": []}, "must name at least one"),
        ({"configs": "some"}, "'all' or 'default'"), ({"dtype": "float32"}, "'bfloat16' or 'float16'"),
        ({"gpu": 80}, "has no option gpu"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any], said: str, tiny_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        export.export(tiny_artifact, "triton", tmp_path / "out", quiet=True, **options)
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_said(tiny_llama: Any, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TritonOptions()
    assert plan.why_not(Source(tiny_artifact), options) is None
    assert "not compressed" in (plan.why_not(Source(tiny_llama()), options) or "")
    source = Source(tiny_artifact)
    source.dtype = torch.float32
    assert "it computes in float32" in (plan.why_not(source, options) or "")
    assert plan.why_not(source, TritonOptions(dtype="bfloat16")) is None


def test_layers_that_stay_on_other_kernels_are_named(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.formats.quantization_config import ModuleEntry
    from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme

    source = Source(tiny_artifact)
    float8 = Scheme(GridScheme(8, "float", True, "channel"), ActivationScheme(8, "float"))
    first = next(iter(source.entries))
    source.entries[first] = ModuleEntry(float8, "float-quantized", None)
    kernels = plan.layers(source, TritonOptions(), 90)
    assert kernels[first] == "fp8-cuda"
    assert plan.others(kernels) == {first: "fp8-cuda"}
    assert plan.tally(plan.others(kernels)) == "1 fp8-cuda"
    assert plan.others(plan.layers(source, TritonOptions(), 80)) == {first: "reference"}
    for name in source.entries:
        source.entries[name] = ModuleEntry(float8, "float-quantized", None)
    assert plan.why_not(source, TritonOptions()) is None, "the fused engine's own kernels are Triton's"
    said = f"no Triton kernel computes any of its {len(kernels)} compressed layers on sm_80 ({len(kernels)} reference)"
    assert plan.why_not(source, TritonOptions(gpus="80")) == said
    monkeypatch.setattr(plan.llama_structure, "read_program", lambda *_, **__: "odd")
    assert "no Triton kernel computes any of its" in (plan.why_not(source, TritonOptions()) or "")


@pytest.mark.parametrize(
    ("kind", "sizes", "kernel"),
    [("row_codebook", {}, "row-codebook-triton"), ("k_mixture", {"hidden_size": 256}, "k-quant-triton")],
)
def test_codebooks_and_k_quants_are_compiled_for(kind: str, sizes: Any, kernel: str, made: Any) -> None:
    """Their layers of one input are joined where they are alike, and every kind of codes has its own launches."""
    source = Source(made(kind, **sizes))
    found = plan.launches(source, TritonOptions(), 90)
    assert found.engine is None
    assert set(found.kernels.values()) == {kernel}
    codes = {dict(each.arguments)["CODES"] for each in found.variants if each.kernel == "matvec.matvec_kernel"}
    assert codes == ({"='table'"} if kind == "row_codebook" else {"='integer'", "='minimum'", "='table'"})
    outliers = "matvec.outliers_kernel" in {each.kernel for each in found.variants}
    assert outliers == (kind == "row_codebook")


def test_float8_attention_beside_dense_experts_is_compiled_for(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    from runtime.formats.quantization_config import ModuleEntry
    from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme
    from runtime.modeling.experts import find_fused, unfuse
    from runtime.modeling.skeleton import build_skeleton, read_config

    config = MixtralConfig(
        hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=256, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = build_skeleton(read_config(tmp_path), torch.bfloat16)
    entry = ModuleEntry(
        Scheme(GridScheme(8, "float", True, "channel"), ActivationScheme(8, "float")), "float-quantized"
    )
    source: Any = SimpleNamespace(
        skeleton=model, dtype=torch.bfloat16, embeddings=set(), artifact=SimpleNamespace(manifest=None)
    )

    def take(part: str) -> None:
        matrices = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        source.entries = {name: entry for name in matrices if part in name}
        source.shapes = {name: tuple(module.weight.shape) for name, module in matrices.items()}

    take("self_attn")
    assert plan.why_not(source, TritonOptions()) is None
    assert find_fused(model)
    unfuse(model)
    assert plan.why_not(source, TritonOptions()) is None
    take("experts.0")
    assert "no Triton kernel computes any of its 3 compressed" in (plan.why_not(source, TritonOptions()) or "")


def test_it_is_listed(tiny_artifact: Path) -> None:
    assert export.fitting(tiny_artifact)["triton"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_two_gpus(tiny_artifact: Path, tmp_path: Path, few_launches: Any) -> None:
    with few_launches(4):
        found = export.export(tiny_artifact, "triton", tmp_path / "both", gpus="90,100", configs="default", quiet=True)
    assert set(found.facts["gpus"]) == {"sm_90", "sm_100"}
    assert {entry["architecture"] for entry in index(found.path)} == {"sm_90a", "sm_100a"}
    assert found.verification is not None
    assert found.verification.metrics["compiled_again"] == 6


#: Modules of the kernels that a step of the tiny artifact launches.
MODULES = ("matvec", "matmul", "paged_attention", "chunk_attention", "fused", "rotary_store")


@pytest.mark.sampled(0, 1)
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", MODULES)
def test_all_configurations(tiny_artifact: Path, tmp_path: Path, few_launches: Any, module: str) -> None:
    each, few = (
        plan.launches(Source(tiny_artifact), TritonOptions(configs=name), 100).variants for name in ("all", "default")
    )
    assert len(each) > 1.5 * len(few)
    assert {variant.kernel.partition(".")[0] for variant in each} == set(MODULES)
    with few_launches(prefix=f"{module}."):
        found = export.export(tiny_artifact, "triton", tmp_path / "all", gpus="100", configs="all", quiet=True)
    assert set(found.facts["gpus"]) == {"sm_100"}
    kernels = index(found.path)
    assert len(kernels) == sum(variant.kernel.startswith(f"{module}.") for variant in each)
    assert module != "matvec" or all(entry["spill_bytes"] == 0 for entry in kernels)
    assert found.verification is not None
    assert found.verification.metrics["compiled_again"] == min(3, len({entry["kernel"] for entry in kernels}))
