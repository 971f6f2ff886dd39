"""What a prepared file must hold is known before: files that say something else are never used, and their size is no surprise."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import BATCH

import runtime
from runtime.checkpoint.artifact import Artifact
from runtime.engines.blueprint import Blueprint
from runtime.engines.streaming.load import expected, group_bytes
from runtime.engines.streaming.prepared_file import PAGE, PreparedFile
from runtime.layers.compressed_linear import choose


def rewritten(file: Path, change: Any) -> None:
    """Change the header and give it the digest that it then has."""
    content = file.read_bytes()
    room = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + room])
    meta = header["__metadata__"]
    inside = json.loads(meta["compress"])
    change(header, inside)
    meta |= {"compress": json.dumps(inside), "digest": "0" * 64}
    raw = json.dumps(header).encode().ljust(room)
    meta["digest"] = hashlib.sha256(raw).hexdigest()
    file.write_bytes(content[:8] + json.dumps(header).encode().ljust(room) + content[8 + room :])


PROJECTION = "model.layers.2.mlp.down_proj"


def flatten(name: str) -> Any:
    def change(header: Any, inside: Any) -> None:
        first, *rest = header[name]["shape"]
        header[name]["shape"] = [math.prod([first, *rest]), *[1 for _ in rest]]

    return change


def retype(name: str, dtype: str, factor: int) -> Any:
    def change(header: Any, inside: Any) -> None:
        entry = header[name]
        entry["dtype"], entry["shape"][-1] = dtype, entry["shape"][-1] * factor

    return change


def rename(old: str, new: str) -> Any:
    return lambda header, inside: header.update({new: header.pop(old)})


LIES = {
    "weight": (flatten(f"{PROJECTION}.prepared_weight"), "prepared_weight as"),
    "scale": (flatten(f"{PROJECTION}.prepared_scale"), "prepared_scale as"),
    "dtype": (retype(f"{PROJECTION}.prepared_scale", "U8", 4), "prepared_scale as torch.uint8"),
    "missing": (rename(f"{PROJECTION}.prepared_scale", f"{PROJECTION}.prepared_other"), "lacks .*prepared_scale"),
    "norm": (rename("model.norm.weight", "model.layers.9.norm.weight"), "has model.layers.9.norm.weight, which"),
    "block": (rename("model.norm.weight", "model.layers.1.norm.weight"), "among the tensors of no block"),
    "alias": (lambda header, inside: inside["aliases"].clear(), r"lacks (lm_head|model\.embed_tokens)\.weight"),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_tensors_that_do_not_fit_the_layers_are_never_used(
    artifacts: dict[str, Path], makes: list[Path], lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = runtime.load(artifacts["llama"]).logits(BATCH)
    change, message = LIES[lie]
    rewritten(makes[0], change)
    with caplog.at_level(logging.WARNING, "compress.cache"):
        assert torch.equal(runtime.load(artifacts["llama"]).logits(BATCH), before)
    (record,) = caplog.records
    assert re.search(f"prepared weights are made again: .*{message}", record.getMessage())
    runtime.load(artifacts["llama"])
    assert len(makes) == 2


@pytest.mark.sampled(16, 8)
@pytest.mark.parametrize("name", ["llama", "k_quants", "lossless", "ternary", "trellis", "codebooks", "turned", "gpt2"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_is_known_before(
    artifacts: dict[str, Path], makes: list[Path], name: str, kernels: str, dtype: str
) -> None:
    blueprint = Blueprint(Artifact(artifacts[name]), torch.device("cpu"), kernels, getattr(torch, dtype), False)
    chosen = choose(blueprint.module, kernels, blueprint.dtype, blueprint.device)
    tensors = expected(blueprint.module, chosen, blueprint.dtype, blueprint.device)
    guess = sum(group_bytes(blueprint.module, tensors).values())
    runtime.load(artifacts[name], kernels=kernels, dtype=dtype)
    groups = PreparedFile(makes[0], makes[0].parent.name).groups
    found = sum(group.size for group in groups)
    assert guess <= found <= guess + len(groups) * PAGE + len(tensors) * 64
