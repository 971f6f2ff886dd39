"""from_pretrained: our artifacts through our quantizer, shared formats through the compressed-tensors package."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from weight_cases import int_scheme, write_checkpoint

import runtime
from runtime.checkpoint.guard import NOTICE
from runtime.formats.quantization_config import parse
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme
from runtime.layers.compressed_linear import CompressedLinear, install
from runtime.layers.compressed_module import CompressedModule

ROOT = Path(runtime.__file__).parents[1]
IDS = torch.tensor([[1, 5, 98, 3, 0, 7, 7], [4, 4, 2, 60, 9, 1, 30]])
W8, F8 = GridScheme(8, "int", True, "channel"), GridScheme(8, "float", True, "channel")


def tiny(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=99, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # and not .to(dtype), which would round the rotary frequencies too
        parameter.data = parameter.data.to(dtype)
    return model


def save(path, scheme, dtype=torch.float32, embedding=False, head=True, input_scale=None):
    """The checkpoint on disk, and the dense model it should be equal to."""
    model = tiny(dtype)
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and (head or n != "lm_head")]
    names += ["model.embed_tokens"] if embedding else []
    dense = write_checkpoint(path, model, dict.fromkeys(names, scheme), dtype, input_scale)
    for name, weight in dense.items():
        model.get_submodule(name).weight.data = weight
    return model


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def method(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]["quant_method"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "scheme",
    [int_scheme(4, group=4), int_scheme(3), int_scheme(4, False), int_scheme(4, False, 4), Scheme(F8)],
    ids=str,
)
def test_shared_formats_load_through_compressed_tensors(tmp_path, scheme, dtype):
    dense = save(tmp_path, scheme, dtype)
    assert method(tmp_path) == "compressed-tensors"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(dense))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("scheme", "input_scale"),
    [
        (Scheme(W8, ActivationScheme()), None),
        (Scheme(W8, ActivationScheme(8, "int", False)), None),
        (Scheme(W8, ActivationScheme(8, "int", True, False, "tensor")), 0.02),
        (Scheme(F8, ActivationScheme(8, "float")), None),
        (Scheme(F8, ActivationScheme(8, "float", True, False, "tensor")), 0.01),
        (Scheme(GridScheme(4, "int", True, "group", 4), ActivationScheme()), None),
    ],
    ids=str,
)
def test_the_reference_rounds_activations_as_compressed_tensors_does(tmp_path, scheme, input_scale, dtype):
    save(tmp_path, scheme, dtype, input_scale=input_scale)
    assert method(tmp_path) == "compressed-tensors"
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path))
    ours = tiny(dtype)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    install(ours, parse(config, [n for n, m in ours.named_modules() if isinstance(m, torch.nn.Linear)]))
    ours.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for module in ours.modules():
        if isinstance(module, CompressedModule):
            module.prepare("reference")
    assert torch.equal(logits(ours), theirs)


OWN = [
    (int_scheme(4, group=32), False),  # ragged: 172 % 32
    (int_scheme(4, False, 32, "2:4"), False),
    (int_scheme(3, False, "channel", "unstructured"), True),
    (Scheme(None, None, "2:4"), True),
    (Scheme(None, None, "unstructured"), False),
    (int_scheme(4, False, 4), True),  # a packed embedding
]


@pytest.mark.parametrize(("scheme", "embedding"), OWN, ids=str)
def test_own_formats_load_and_save(tmp_path, scheme, embedding):
    (tmp_path / "a").mkdir()
    dense = save(tmp_path / "a", scheme, torch.float32, embedding)
    assert method(tmp_path / "a") == "compress"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert isinstance(model.lm_head, CompressedLinear)
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "b")
    original = load_file(tmp_path / "a" / "model.safetensors")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    # Beside the stored tensors: what stops readers that do not know them.
    packed = [name for name, module in model.named_modules() if isinstance(module, CompressedModule)]
    assert set(saved) == set(original) | {f"{name}.weight" for name in packed} | {NOTICE}
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert torch.equal(logits(again), logits(model))
    assert not told["unexpected_keys"]
    torch.testing.assert_close(runtime.load(tmp_path / "b").logits(IDS), logits(model), rtol=1e-4, atol=1e-5)
    plain = model.dequantize()
    assert type(plain.lm_head) is torch.nn.Linear
    assert torch.equal(logits(plain), logits(dense))


def test_kernels_run_under_from_pretrained(tmp_path):
    (tmp_path / "a").mkdir()
    dense = save(tmp_path / "a", int_scheme(4, False, 32, "2:4"), torch.bfloat16, head=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    layers = [m for m in model.modules() if isinstance(m, CompressedLinear)]
    assert len(layers) == 14
    assert not {m.kernel_name for m in layers} & {"reference"}
    assert type(model.lm_head) is torch.nn.Linear
    torch.testing.assert_close(logits(model), logits(dense), rtol=0.05, atol=0.03)
    model.save_pretrained(tmp_path / "b")  # from the kernel's layout back to the one on disk
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert torch.equal(logits(again), logits(model))
    generated = model.generate(IDS[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, IDS.shape[1] + 3)


def test_every_missing_tensor_is_an_error(tmp_path):
    save(tmp_path, int_scheme(4, group=32))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for lost in ("weight_scale", "weight_packed", "weight_shape"):
        name = f"model.layers.1.mlp.up_proj.{lost}"
        save_file({k: v for k, v in tensors.items() if k != name}, file, metadata={"format": "pt"})
        with pytest.raises(runtime.ArtifactError, match=name.replace(".", r"\.")):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_disk_offload_is_refused(tmp_path):
    save(tmp_path, int_scheme(4, group=32))
    with pytest.raises(runtime.RequestError, match="offloaded to disk"):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=str(tmp_path))


def test_the_config_survives(tmp_path):
    save(tmp_path, int_scheme(4, group=32, sparsity="unstructured"))
    before = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert json.loads(model.config.to_json_string(use_diff=False))["quantization_config"] == before
    assert copy.deepcopy(model.config).quantization_config.to_dict() == before


# ---------------------------------------------------------------- CompressConfig, and what transformers builds on a model
@pytest.mark.parametrize("scheme", [int_scheme(4, group=32), int_scheme(4, group=4)], ids=["own", "shared"])
def test_a_users_config_chooses_kernels_and_keeps_weights_packed(tmp_path, scheme):
    (tmp_path / "a").mkdir()
    dense = save(tmp_path / "a", scheme)
    asked = runtime.CompressConfig(kernels="reference", threads=torch.get_num_threads())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", quantization_config=asked)
    assert {m.kernel_name for m in model.modules() if isinstance(m, CompressedLinear)} == {"reference"}
    assert isinstance(model.lm_head, CompressedLinear)
    assert torch.equal(logits(model), logits(dense))
    model.save_pretrained(tmp_path / "b")  # word for word, so that who read it before reads it still
    before, after = (json.loads((tmp_path / n / "config.json").read_text())["quantization_config"] for n in "ab")
    assert after == before
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "b", quantization_config=asked)), logits(dense)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "refrence"}, "unknown kernel 'refrence'.*did you mean 'reference'"),
        ({"kernel": "reference"}, "has no option 'kernel'; did you mean 'kernels'"),
        ({"format": "bitmap"}, "format is 'mixed-precision' in the checkpoint, not 'bitmap'"),
        ({"threads": 0}, "threads must be an integer >= 1"),
    ],
    ids=str,
)
def test_a_users_config_cannot_change_the_checkpoint(tmp_path, options, message):
    save(tmp_path, int_scheme(4, group=32))
    with pytest.raises(runtime.RequestError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=runtime.CompressConfig(**options))


def test_a_users_config_wants_a_compressed_checkpoint(tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(runtime.RequestError, match="this checkpoint is not compressed"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=runtime.CompressConfig())
    with pytest.raises(runtime.RequestError, match="quant_method 'gptq'"):
        runtime.CompressConfig().of_checkpoint({"quant_method": "gptq"})


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.7, "no_repeat_ngram_size": 2},
        {"num_beams": 3, "do_sample": True, "temperature": 0.9},
        {"do_sample": True, "top_k": 20},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ],
    ids=str,
)
def test_generate_is_that_of_the_dense_model(tmp_path, options, kernels):
    dense = save(tmp_path, int_scheme(4, False, 32, "2:4"), head=False)
    config = runtime.CompressConfig(kernels=kernels)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    outputs = []
    for each in (model, dense):
        torch.manual_seed(3)
        outputs.append(each.generate(IDS, max_new_tokens=12, pad_token_id=0, **options))
    assert torch.equal(*outputs)


def test_a_pipeline_generates(tiny_artifact):
    from transformers import pipeline

    made = pipeline("text-generation", model=str(tiny_artifact), do_sample=False, max_new_tokens=6)
    assert made("line 1: the", return_full_text=False)[0]["generated_text"]
    assert made("line 1: the", num_beams=4, num_return_sequences=2)[1]["generated_text"].startswith("line 1: the")


def test_a_part_of_the_model_loads_as_the_whole_does(tmp_path):
    dense = save(tmp_path, int_scheme(4, group=32))
    config = runtime.CompressConfig(kernels="reference")
    blocks = AutoModel.from_pretrained(tmp_path, quantization_config=config)
    with torch.no_grad():
        assert torch.equal(blocks(IDS).last_hidden_state, dense.model(IDS).last_hidden_state)


def test_a_classifier_on_an_encoder(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertModel(BertConfig(vocab_size=99, **sizes)).eval()
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    dense = write_checkpoint(tmp_path, model, dict.fromkeys(names, int_scheme(4, group=40)), torch.float32)
    for name, weight in dense.items():
        model.get_submodule(name).weight.data = weight
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(loaded.classifier) is torch.nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(loaded.bert(IDS).pooler_output, model(IDS).pooler_output, rtol=1e-4, atol=1e-5)
    loaded(IDS, labels=torch.tensor([0, 2])).loss.backward()
    assert loaded.classifier.weight.grad is not None


# ---------------------------------------------------------------- the hook, in fresh interpreters
ORDERS = {
    "runtime first, twice": "import runtime, importlib; importlib.reload(runtime); import transformers",
    "the quantizer itself first": "import runtime.hf",
    "runtime last, twice": "import transformers.quantizers.auto, runtime, importlib; importlib.reload(runtime)",
}


def python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("imports", ORDERS.values(), ids=ORDERS)
def test_either_import_order_registers(imports):
    table = "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as table"
    done = python(f"{imports}\n{table}\nprint(table['compress'].__name__)")
    assert done.stdout.strip() == "CompressHfQuantizer", done.stderr


def test_import_runtime_imports_nothing_heavy():
    done = python(
        "import sys, runtime; print(sorted({'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr
    done = python(
        "import runtime; print(runtime.CompressError.exit_code, bool(runtime.__version__), 'load' in dir(runtime))"
    )
    assert done.stdout.strip() == "1 True True", done.stderr
    done = python(
        "import sys, torch, runtime.formats, runtime.layers.compressed_linear; print('transformers' in sys.modules)"
    )
    assert done.stdout.strip() == "False", done.stderr


def test_an_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = runtime.laod
