"""Bytes of an artifact: everything that is loaded, and separately its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from compress.core.run_directory import DRAFTS
from runtime.checkpoint.companions import TOKENIZER_FILES
from runtime.checkpoint.headers import read_header


def loaded_bytes(path: Path, manifest: Mapping[str, Any], before: int, after: int) -> dict[str, int]:
    """The manifest's `bytes`.

    Args:
        path: the artifact. manifest: with its draft and cache policy. before, after: bytes of the model's tensors in the source and
            in the artifact.

    Returns:
        `before`, `after`; `draft`: the tensors of the draft's directory; `cache_files`: calibrated values of the cache policy, which
        the manifest holds; `total`: `after + draft + cache_files`, all that is loaded; `tokenizer`: its files, not in `total`.
    """
    place = ((manifest.get("draft") or {}).get("drafter") or {}).get("model")
    files = sorted((path / place).glob("*.safetensors")) if place in DRAFTS else []
    draft = sum(entry.nbytes for file in files for entry in read_header(file).tensors.values())
    calibrated = (manifest.get("kv_cache") or {}).get("calibrated")
    cache = len(to_json(calibrated)) if calibrated else 0
    tokenizer = sum((path / name).stat().st_size for name in TOKENIZER_FILES if (path / name).is_file())
    return {
        "before": before, "after": after, "draft": draft, "cache_files": cache, "total": after + draft + cache, "tokenizer": tokenizer,
    }  # fmt: skip
