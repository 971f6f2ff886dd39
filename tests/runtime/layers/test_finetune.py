"""Adapters trained beside packed weights: gradients, PEFT, Trainer, merging, and loading by the runtime."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_tokenizer
from family_models import FAMILIES
from test_hf import IDS, logits, method, save
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, CompressedTensorsConfig
from weight_cases import int_scheme

import compress
import runtime
from compress.cli import main
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme
from runtime.layers.compressed_linear import CompressedLinear

peft = pytest.importorskip("peft")

OWN = {
    "ragged": int_scheme(4, group=32),  # 172 % 32
    "2:4 int4": int_scheme(4, False, 32, "2:4"),
    "bitmap": Scheme(None, None, "unstructured"),
}
SHARED = {
    "packed": int_scheme(4, group=4),
    "W8A8": Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme()),
}


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=4, **options)
    return peft.get_peft_model(model, config)


def trained(model: Any, steps: int = 8) -> list[float]:
    """Losses of a few steps on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("scheme", [*OWN.values(), SHARED["packed"]], ids=[*OWN, "packed"])
def test_gradients_are_those_of_the_dense_model(tmp_path: Path, scheme: Scheme, checkpointing: bool) -> None:
    dense = save(tmp_path, scheme)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=runtime.CompressConfig())
    found = []
    for each in (model, dense):
        inputs = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        if checkpointing:
            each.gradient_checkpointing_enable({"use_reentrant": False})
            each.train()
        each(inputs_embeds=inputs).logits.square().mean().backward()
        found.append(inputs.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("scheme", [*OWN.values(), *SHARED.values()], ids=[*OWN, *SHARED])
def test_adapters_train_and_are_saved_loaded_and_merged(tmp_path: Path, scheme: Scheme) -> None:
    (tmp_path / "a").mkdir()
    save(tmp_path / "a", scheme, head=False)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "a", quantization_config=runtime.CompressConfig())

    model = adapted(peft.prepare_model_for_kbit_training(load()))
    packed = [m for m in model.modules() if isinstance(m, CompressedLinear)]
    assert len(packed) == len([n for n, _ in model.named_parameters() if "lora_A" in n]) == 14
    before, kernels = [layer.dequantize() for layer in packed], {layer.kernel_name for layer in packed}
    losses = trained(model)
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(layer.dequantize(), weight) for layer, weight in zip(packed, before, strict=True))
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter")
    assert {m.kernel_name for m in again.modules() if isinstance(m, CompressedLinear)} == kernels
    model.eval()
    torch.testing.assert_close(logits(again), logits(model))
    beside = runtime.load(tmp_path / "a", adapter=tmp_path / "adapter")
    torch.testing.assert_close(beside.logits(IDS), logits(model), rtol=1e-4, atol=1e-4)
    if scheme.activations is not None:  # of which a merged layer rounds none
        return
    merged = again.merge_and_unload()
    assert not any(isinstance(m, CompressedLinear) for m in merged.modules())
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-3, atol=1e-3)
    with pytest.raises(runtime.RequestError, match=r"14 layers are dense .* save model.dequantize"):
        merged.save_pretrained(tmp_path / "no")
    merged.dequantize().save_pretrained(tmp_path / "b")
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    torch.testing.assert_close(runtime.load(tmp_path / "b").logits(IDS), logits(merged), rtol=1e-4, atol=1e-4)


def test_bfloat16_layers_under_float32_norms(tmp_path: Path) -> None:
    save(tmp_path, OWN["2:4 int4"], torch.bfloat16, head=False)
    model = peft.prepare_model_for_kbit_training(AutoModelForCausalLM.from_pretrained(tmp_path))
    layers = [m for m in model.modules() if isinstance(m, CompressedLinear)]
    assert {layer.dtype for layer in layers} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    losses = trained(adapted(model))
    assert losses[-1] < losses[0] - 0.5


def test_dora_reads_the_weight(tmp_path: Path) -> None:
    save(tmp_path, OWN["ragged"], head=False)
    byte_tokenizer().save_pretrained(tmp_path)
    model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path), use_dora=True)
    losses = trained(model)
    assert losses[-1] < losses[0] - 0.5
    model.eval()
    before = logits(model)
    torch.testing.assert_close(logits(model.merge_and_unload()), before, rtol=1e-3, atol=1e-3)


def test_plain_transformers_trains_compressed_tensors(tmp_path: Path) -> None:
    save(tmp_path, SHARED["packed"])
    assert method(tmp_path) == "compressed-tensors"
    options: dict[str, Any] = {"dequantize": True}
    if "dequantize" not in CompressedTensorsConfig.__init__.__annotations__:  # before transformers 5.15
        options = {"run_compressed": False}
    config = CompressedTensorsConfig(**options)
    losses = trained(adapted(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)))
    assert losses[-1] < losses[0] - 0.5


def test_trainer_takes_the_model(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    save(tmp_path, OWN["ragged"], head=False)
    byte_tokenizer().save_pretrained(tmp_path)
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    arguments = TrainingArguments(
        tmp_path / "out", max_steps=4, learning_rate=2e-2, lr_scheduler_type="constant", logging_steps=1, save_steps=2, report_to="none",
        use_cpu=True, gradient_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="trainable adapters"):
        Trainer(model, arguments, train_dataset=rows)
    trainer = Trainer(adapted(model), arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    assert (tmp_path / "out" / "checkpoint-4" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_experts_train(tmp_path: Path) -> None:
    path = next(family for family in FAMILIES if family.name == "mixtral").write(tmp_path / "model")
    stages = [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32}}]
    artifact = compress.apply({"name": "t", "model": str(path), "stages": stages}, output=tmp_path / "out", quiet=True)
    model = adapted(AutoModelForCausalLM.from_pretrained(artifact.path, quantization_config=runtime.CompressConfig()))
    assert any(".experts.1.up_proj.lora_A" in name for name, _ in model.named_parameters())
    losses = trained(model)
    assert losses[-1] < losses[0] - 0.5
    model.eval()
    model.save_pretrained(tmp_path / "adapter")
    beside = runtime.load(artifact.path, adapter=tmp_path / "adapter")
    torch.testing.assert_close(beside.logits(IDS), logits(model).float(), rtol=1e-2, atol=1e-2)


def test_a_classifier_on_the_blocks_of_a_language_model(tmp_path: Path) -> None:
    save(tmp_path, OWN["ragged"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2, pad_token_id=0)
    assert type(model.score) is torch.nn.Linear
    assert isinstance(model.model.layers[0].mlp.up_proj, CompressedLinear)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="SEQ_CLS"))
    model(IDS, labels=torch.tensor([0, 1])).loss.backward()
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("score" in name for name in trainable)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """An artifact with a tokenizer, and an adapter of it."""
    save(tmp_path, OWN["ragged"], head=False)
    byte_tokenizer().save_pretrained(tmp_path)
    adapted(AutoModelForCausalLM.from_pretrained(tmp_path)).save_pretrained(tmp_path / "adapter")
    return tmp_path, tmp_path / "adapter"


def test_adapters_are_run_and_wrong_ones_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path, adapter = pair
    assert main(["generate", str(path), "a", "-n", "2", "--adapter", str(adapter)]) == 0
    assert main(["generate", str(path), "a", "-n", "2", "--adapter", str(path)]) == 2
    with pytest.raises(runtime.RequestError, match=r"has no adapter_config\.json"):
        runtime.load(path, adapter=path)
    with pytest.raises(runtime.RequestError, match="max_memory: a model with an adapter"):
        runtime.load(path, adapter=adapter, max_memory="4GB")
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for change, message in (
        ({"r": 5}, "does not fit this model"),
        ({"target_modules": ["up_proj"]}, "is in only one of them"),
        ({"target_modules": ["no_such_layer"]}, "does not fit this model"),
        ({"peft_type": "NO_SUCH"}, "does not fit this model"),
    ):
        (other / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(runtime.ArtifactError, match=message) as caught:
            runtime.load(path, adapter=other)
        assert "\n" not in str(caught.value)
    (other / "adapter_model.safetensors").rename(other / "adapter_model.bin")
    with pytest.raises(runtime.RequestError, match=r"has no adapter_model\.safetensors"):
        runtime.load(path, adapter=other)
