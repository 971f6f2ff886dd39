"""runtime.load: every tensor accounted for, wrong options and directories answered in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import gpt2, llama, save

import runtime
from runtime.errors import ArtifactError, RequestError

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(llama(), tmp_path / "m")


def edit(path: Path, change: Any) -> None:
    """Rewrite model.safetensors after `change(tensors)`."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({k: v for k, v in {**content, **changes}.items() if v is not None}))


BATCH = torch.randint(2, 400, (2, 9), generator=torch.Generator().manual_seed(1))


def same_as_transformers(path: Path, **options: Any) -> Any:
    """The model, whose logits are those of transformers up to the order of float32 sums."""
    from transformers import AutoModelForCausalLM

    ours = runtime.load(path)
    theirs = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    with torch.inference_mode():
        found, wanted = ours.logits(BATCH), theirs(BATCH).logits.float()
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    return ours


@pytest.mark.parametrize("layout", ["single", "shards", "shards without index"])
@pytest.mark.parametrize("tied", [True, False])
def test_any_layout(tmp_path: Path, layout: str, tied: bool) -> None:
    options = {} if layout == "single" else {"max_shard_size": "50KB"}
    path = save(llama(tie_word_embeddings=tied), tmp_path / "m", **options)
    model = same_as_transformers(path)
    if layout != "single":
        assert len(model.artifact.checkpoint.files()) > 2
    if layout == "shards without index":
        (path / "model.safetensors.index.json").unlink()
        assert torch.equal(runtime.load(path).logits(BATCH), model.logits(BATCH))
    embedding, head = model.engine.module.get_input_embeddings(), model.engine.module.get_output_embeddings()
    assert (embedding.weight is head.weight) == tied


def rope(kind: str) -> dict[str, Any]:
    numbers = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        numbers |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_type": kind, **numbers}


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_rotary_frequencies_are_computed_not_left_empty(tmp_path: Path, kind: str) -> None:
    same_as_transformers(save(llama(rope_parameters=rope(kind)), tmp_path / "m"))


def families() -> dict[str, Any]:
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        OPTConfig,
        OPTForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )  # fmt: skip

    common = {"vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "max_position_embeddings": 128, "initializer_range": 0.3}  # fmt: skip
    wide = {**common, "intermediate_size": 96, "num_key_value_heads": 2}
    return {
        "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**wide, head_dim=16, sliding_window=6)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**wide, head_dim=16)),
        "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**wide, num_local_experts=4)),
        "opt": lambda: OPTForCausalLM(OPTConfig(**common, ffn_dim=96, word_embed_proj_dim=64)),
        "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**common, intermediate_size=96)),
        "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=400, hidden_size=64, n_layer=2, n_head=4)),
        "gpt2": gpt2,
    }


@pytest.mark.parametrize("family", ["gemma2", "qwen3", "mixtral", "opt", "neox", "bloom", "gpt2"])
def test_families(tmp_path: Path, family: str) -> None:
    """Mixtral is stored expert by expert and held fused, Bloom takes no positions, OPT offsets them."""
    torch.manual_seed(0)
    model = same_as_transformers(save(families()[family]().eval(), tmp_path / "m", with_tokenizer=False))
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18]]
    alone = [model.generate(p, max_new_tokens=10, ignore_eos=True) for p in prompts]
    assert model.generate(prompts, max_new_tokens=10, ignore_eos=True) == alone


def test_a_bare_base_model_is_recognised(tmp_path: Path) -> None:
    """GPT-2 on the hub has no "transformer." before its names, and carries masks that nobody needs."""
    path = save(gpt2(), tmp_path / "m", with_tokenizer=False)
    expected = runtime.load(path).logits(BATCH)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)

    edit(path, rename)
    assert torch.equal(runtime.load(path).logits(BATCH), expected)
    same_as_transformers(path)


def test_a_stored_head_that_differs_is_not_tied(path: Path) -> None:
    edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    same_as_transformers(path)
    edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    module = runtime.load(path).engine.module
    assert module.get_input_embeddings().weight is module.get_output_embeddings().weight


def test_only_the_head_of_a_tied_pair_is_stored(path: Path) -> None:
    expected = runtime.load(path).logits(BATCH)
    edit(path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(runtime.load(path).logits(BATCH), expected)


# -------------------------------------------------------------------- dtype, device, threads
def test_dtype_is_the_checkpoints_unless_asked(tmp_path: Path) -> None:
    path = save(llama().bfloat16(), tmp_path / "m")
    module = runtime.load(path).engine.module
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32
    for dtype in ("float32", torch.float32, "fp32", "float"):
        module = runtime.load(path, dtype=dtype).engine.module
        assert {p.dtype for p in module.parameters()} == {torch.float32}
    edit_json(path / "config.json", dtype=None)
    assert runtime.load(path).engine.module.dtype == torch.bfloat16
    edit_json(path / "config.json", dtype="int3")
    with pytest.raises(ArtifactError, match="dtype 'int3'"):
        runtime.load(path)


def test_threads(path: Path) -> None:
    before = torch.get_num_threads()
    try:
        runtime.load(path, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu(path: Path) -> None:
    on_gpu, on_cpu = runtime.load(path), runtime.load(path, device="cpu")
    assert on_gpu.engine.device.type == "cuda"
    assert torch.allclose(on_gpu.logits(BATCH).cpu(), on_cpu.logits(BATCH), atol=1e-3)
    prompts = [[5, 6, 7], [9]]
    assert on_gpu.generate(prompts, max_new_tokens=8) == on_cpu.generate(prompts, max_new_tokens=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpux"}, "device 'gpux'"),
        ({"device": "cuda:99"}, "device 'cuda:99'"),
        ({"device": 3.5}, "device '3.5'"),
        ({"threads": 0}, "threads must be an integer >= 1, not 0"),
        ({"threads": "2"}, "threads"),
        ({"dtype": "bfloat"}, "did you mean 'bfloat16'"),
        ({"dtype": torch.int8}, "dtype 'int8' is unknown"),
        ({"kernel": "auto"}, r"load\(\) has no option 'kernel': did you mean 'kernels'"),
        ({"kernels": "fastest"}, "kernels 'fastest'"),
        ({"verify": True}, "cannot be verified"),
        ({"max_memory": "2 giga"}, "max_memory must be a number of bytes or a text .*, not '2 giga'"),
        ({"max_memory": 0}, "max_memory must be a number of bytes"),
        ({"max_memory": "1MB"}, "max_memory 1 MB is too little: this model needs at least"),
        ({"max_memmory": "1GB"}, "did you mean 'max_memory'"),
    ],
)
def test_wrong_options(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        runtime.load(path, **options)


# -------------------------------------------------------------------- tensors that do not fit
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"tensor {NAME} is missing: LlamaForCausalLM needs it"),
        (lambda t: t.update({NAME: torch.zeros(96, 63)}), rf"tensor {NAME} has shape \[96, 63\].*needs \[96, 64\]"),
        (lambda t: t.update({NAME: torch.zeros(64, 96)}), r"has shape \[64, 96\]"),
        (lambda t: t.update({NAME: t[NAME].to(torch.int8)}), f"tensor {NAME} is int8, expected float32"),
        (lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)}), "no quantization_config"),
        (lambda t: t.update({NAME + "s": t[NAME].clone()}), rf"{NAME}s.*{NAME}"),
        (lambda t: t.update({"mtp.0.weight": torch.zeros(2), "mtp.1.weight": torch.zeros(2)}), "and 1 more"),
        (lambda t: t.update({NAME + "s": t.pop(NAME)}), f"{NAME} is missing"),
    ],
)
def test_tensors_that_do_not_fit(path: Path, change: Any, message: str) -> None:
    edit(path, change)
    with pytest.raises(ArtifactError, match=message) as caught:
        runtime.load(path)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------- directories that cannot be used
def test_wrong_path(path: Path) -> None:
    with pytest.raises(ArtifactError, match="/m"):
        runtime.load(path.parent / "mm")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llamax", "architectures": None}, "config.json cannot be used"),
        ({"model_type": None}, "config.json cannot be used"),
        ({"num_attention_heads": 7}, "config.json"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"quantization_config": 3}, "quantization_config"),
        ({"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"},
         "trust_remote_code"),
    ],
)  # fmt: skip
def test_unusable_configs(path: Path, changes: dict[str, Any], message: str) -> None:
    (path / "evil.py").write_text("raise SystemExit('remote code was run')")
    edit_json(path / "config.json", **changes)
    with pytest.raises(ArtifactError, match=message) as caught:
        runtime.load(path)
    assert "\n" not in str(caught.value)


def test_a_damaged_tokenizer_is_an_error(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ArtifactError, match="tokenizer"):
        runtime.load(path)


@pytest.mark.parametrize(("value", "expected"), [(7, {7}), ([7, 8], {7, 8})])
def test_end_of_sequence_comes_from_the_generation_config(path: Path, value: Any, expected: set[int]) -> None:
    edit_json(path / "generation_config.json", eos_token_id=value)
    assert runtime.load(path).eos_token_ids == expected
    (path / "generation_config.json").unlink()
    assert runtime.load(path).eos_token_ids == {1}
    edit_json(path / "config.json", eos_token_id="</s>")
    with pytest.raises(ArtifactError, match="eos_token_id"):
        runtime.load(path)


def test_load_is_still_a_function_after_every_import() -> None:
    """A submodule named like the function would take its place on the package."""
    code = (
        "import runtime, pkgutil, importlib\n"
        "first = runtime.load\n"
        "for module in pkgutil.iter_modules(runtime.__path__, 'runtime.'):\n"
        "    module.name == 'runtime.layers.hf' or importlib.import_module(module.name)\n"  # imports transformers: slow
        "assert runtime.load is first and callable(first)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
