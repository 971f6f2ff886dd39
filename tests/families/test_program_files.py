"""Programs of many families, run from disk without transformers' code of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from program_families import model_of

import compress
import runtime
from runtime.engines import blueprint, choose
from runtime.kernels.cpu import library
from runtime.system.directories import cache_directory

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
#: With latent attention and a correction of experts' scores, two rotations, transposed weights and learned positions, experts with biases
#: and sinks, norms of each head's own, scaled logits.
NAMES = ["DeepseekV3", "Gemma3", "GPT2", "GptOss", "StableLm, parallel, norms of heads", "Mixtral", "Falcon", "Cohere2"]


@pytest.mark.parametrize("name", NAMES)
def test_a_later_load_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(cache_directory("native"), target_is_directory=True)
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choose, "SMALLEST", 0)
    model_of(name).save_pretrained(tmp_path / "model")
    stage = {"quantize": {"method": "rtn", "bits": 4, "group_size": 16}}
    made = compress.apply(
        {"name": "t", "model": str(tmp_path / "model"), "stages": [stage]}, output=tmp_path / "a", quiet=True
    )
    first = runtime.load(made.path)

    def refused(*_: object) -> None:
        raise AssertionError("a model of transformers is built")

    with monkeypatch.context() as patch:
        patch.setattr(blueprint, "build_skeleton", refused)
        second = runtime.load(made.path)
        assert torch.equal(second.logits(IDS), first.logits(IDS))
        tokens = [model.generate([5, 6, 7], max_new_tokens=12, ignore_eos=True) for model in (first, second)]
        assert tokens[0] == tokens[1]
    assert second.explain() == first.explain()
