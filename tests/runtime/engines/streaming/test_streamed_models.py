"""Models whose blocks are read while others compute: the same numbers to the bit, whatever happens in between."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import BATCH
from tiny_models import llama, save

import runtime
from runtime.engines.native.engine import NativeEngine
from runtime.engines.streaming.engine import StreamedNative, StreamedTorch
from runtime.engines.streaming.ring import THREAD
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import ArtifactError, RequestError
from runtime.kernels.cpu import library

Load = Callable[..., Any]
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18]]


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("name", ["llama", "turned", "floats", "lossless", "ternary", "gpt2"])
def test_bit_identical(artifacts: dict[str, Path], load_streamed: Load, name: str, slots: int) -> None:
    whole = runtime.load(artifacts[name])
    model = load_streamed(artifacts[name], slots)
    lean = isinstance(whole.engine, NativeEngine)
    assert type(model.engine) is (StreamedNative if lean else StreamedTorch)
    assert len(model.engine.ring.order) == 5 - max(0, slots - 3)
    for _ in range(2):
        assert torch.equal(model.logits(BATCH), whole.logits(BATCH))
    assert model.generate(PROMPTS, max_new_tokens=10) == whole.generate(PROMPTS, max_new_tokens=10)
    assert model.score([5, 6, 7, 8]) == whole.score([5, 6, 7, 8])
    assert model.explain() == whole.explain()
    assert model.stats["weight_bytes"] < whole.stats["weight_bytes"]
    expected, found = whole.engine.module.state_dict(), model.engine.module.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reference_kernels_and_other_dtypes(artifacts: dict[str, Path], load_streamed: Load, name: str) -> None:
    for options in ({"kernels": "reference"}, {"dtype": "bfloat16"}):
        whole, model = runtime.load(artifacts[name], **options), load_streamed(artifacts[name], 2, **options)
        assert torch.equal(model.logits(BATCH), whole.logits(BATCH))


def test_what_fits_is_not_streamed(artifacts: dict[str, Path]) -> None:
    whole, model = runtime.load(artifacts["llama"]), runtime.load(artifacts["llama"], max_memory="2GB")
    assert type(model.engine) is NativeEngine
    assert torch.equal(model.logits(BATCH), whole.logits(BATCH))


def test_plain_checkpoints(tmp_path: Path, load_streamed: Load) -> None:
    path = save(llama(num_hidden_layers=5), tmp_path / "m")
    whole, model = runtime.load(path), load_streamed(path, 3)
    lean = library.load() is not None
    assert type(whole.engine) is (NativeEngine if lean else TorchEngine)
    assert type(model.engine) is (StreamedNative if lean else StreamedTorch)
    assert torch.equal(model.logits(BATCH), whole.logits(BATCH))
    assert torch.equal(runtime.load(path, max_memory="3GiB").logits(BATCH), whole.logits(BATCH))


def test_checkpoints_that_transformers_has_to_convert(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    path = save(MixtralForCausalLM(config), tmp_path / "m")
    with pytest.raises(RequestError, match="max_memory"):
        runtime.load(path, max_memory="1GB")


# -------------------------------------------------------------------- faults
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_file_that_shrinks_or_goes(artifacts: dict[str, Path], load_streamed: Load, home: Path, name: str) -> None:
    model = load_streamed(artifacts[name], 2)
    expected = model.logits(BATCH)
    file = next(home.glob("*/*.safetensors"))
    content = file.read_bytes()
    os.truncate(file, len(content) // 2)
    with pytest.raises(ArtifactError, match="truncated"):
        model.generate(PROMPTS[0], max_new_tokens=3, ignore_eos=True)
    file.write_bytes(content)  # the same inode: what was lost is back
    assert torch.equal(model.logits(BATCH), expected)
    file.unlink()
    assert torch.equal(model.logits(BATCH), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_disk_errors(
    artifacts: dict[str, Path], load_streamed: Load, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_streamed(artifacts[name], 2)
    expected = model.generate(PROMPTS[0], max_new_tokens=8)
    read, left = os.preadv, [7]

    def failing(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "Input/output error")
        return read(*arguments)

    monkeypatch.setattr("runtime.engines.streaming.ring.os.preadv", failing)
    with pytest.raises(ArtifactError, match=r"weights\.safetensors"):
        model.generate(PROMPTS[0], max_new_tokens=8)
    left[0] = 10**6
    assert model.generate(PROMPTS[0], max_new_tokens=8) == expected


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_interrupts_leave_it_usable(artifacts: dict[str, Path], load_streamed: Load, name: str) -> None:
    model = load_streamed(artifacts[name], 2)
    expected = model.logits(BATCH)
    ring, took = model.engine.ring, [0]
    take = ring.take

    def interrupted(number: int) -> int:
        slot = take(number)
        took[0] += 1
        if took[0] == 3:
            raise KeyboardInterrupt
        return slot

    ring.take = interrupted
    for _ in range(2):
        took[0] = 0
        with pytest.raises(KeyboardInterrupt):
            model.logits(BATCH)
        took[0] = 100
        assert torch.equal(model.logits(BATCH), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_threads_take_turns(artifacts: dict[str, Path], load_streamed: Load, name: str) -> None:
    model = load_streamed(artifacts[name], 3)
    expected = [model.generate(prompt, max_new_tokens=6) for prompt in PROMPTS]
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(model.generate, prompt, max_new_tokens=6) for _ in range(3) for prompt in PROMPTS]
        assert [job.result(60) for job in jobs] == expected * 3
        batches = [pool.submit(model.engine.logits, BATCH) for _ in range(4)]
        assert all(torch.equal(job.result(60), batches[0].result(60)) for job in batches)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_thread_ends_with_the_model(artifacts: dict[str, Path], load_streamed: Load, name: str) -> None:
    def running() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]

    before = running()
    model = load_streamed(artifacts[name], 2)
    model.logits(BATCH)
    assert len(running()) == len(before) + 1
    model.engine.close()
    model.engine.close()
    assert running() == before
    with pytest.raises(ArtifactError, match="closed"):
        model.logits(BATCH)
    model = load_streamed(artifacts[name], 2)
    model.logits(BATCH)
    load_streamed.loaded.clear()  # type: ignore[attr-defined]
    (thread,) = set(running()) - set(before)
    del model
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
