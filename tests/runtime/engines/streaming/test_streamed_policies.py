"""Cache policies beside streamed weights: the same tokens as with all weights in memory, and the pages that the bound leaves room for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compressed_models import compress as compressed
from compressed_models import inside_blocks
from tiny_models import llama

import runtime
from runtime.engines.native.engine import NativeEngine
from runtime.engines.streaming.engine import StreamedNative, StreamedTorch
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")
PROMPTS = [[(7 * i + j) % 390 + 4 for i in range(length)] for j, length in enumerate((180, 30, 250))]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies") / "llama"
    compressed(
        llama(num_hidden_layers=5, head_dim=32, max_position_embeddings=512), path, inside_blocks("pack-quantized")
    )
    return path


@pytest.mark.parametrize("drafter", [False, {"method": "lookup"}], ids=["plain", "lookup"])
@pytest.mark.parametrize(
    "policy",
    [{"keys": "int4", "values": "int4", "recent": 64}, {"keys": "fp8", "recent": 0}, {"method": "h2o"}],
    ids=str,
)
def test_streamed_weights(artifact: Path, load_streamed: Callable[..., Any], policy: Any, drafter: Any) -> None:
    whole = runtime.load(artifact, kv_cache=policy)
    assert type(whole.engine) is NativeEngine
    model = load_streamed(artifact, 3, kv_cache=policy, drafter=drafter)
    assert type(model.engine) is StreamedNative
    assert model.stats["kv_cache"] == whole.stats["kv_cache"]
    assert model.engine.page_bytes == whole.engine.page_bytes
    options = {"max_new_tokens": 80, "ignore_eos": True}
    assert model.generate(PROMPTS, **options) == whole.generate(PROMPTS, **options)


def test_a_policy_that_pages_cannot_be_runs_in_streamed_modules(
    artifact: Path, load_streamed: Callable[..., Any]
) -> None:
    model = load_streamed(artifact, 3, kv_cache={"evict": {"score": "h2o", "layers": "cake", "ratio": 0.5}})
    assert type(model.engine) is StreamedTorch
    assert (
        "holds no cache whose policy says to evict tokens by h2o, of layers that share the budget as cake says"
        in model.explain()["model"]
    )
