"""What an export does not take along is said: while it is made, in export.json and in its README."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from export import export
from runtime.kv_cache.policy.policy import Policy
from runtime.system.self_hash import sealed_json


@pytest.mark.parametrize("written", [None, "kivi"])
def test_a_cache_policy_that_stays_behind_is_said(tiny_artifact: Path, tmp_path: Path, written: str | None) -> None:
    path = shutil.copytree(tiny_artifact, tmp_path / "artifact")
    manifest = json.loads((path / "compress.json").read_text(encoding="utf-8"))
    manifest["kv_cache"] = None if written is None else Policy.parse(written).resolved()
    (path / "compress.json").write_text(sealed_json(manifest), encoding="utf-8")
    made = export(path, "huggingface", tmp_path / "out", verify=False, quiet=True)
    facts = json.loads((made.path / "export.json").read_text(encoding="utf-8"))
    if written is None:
        assert facts["left_behind"] is None
        assert not any("KV-cache" in line for line in made.warnings)
        return
    assert "KV-cache policy (keys int2, values int2) stays behind" in facts["left_behind"]
    assert facts["left_behind"] in made.warnings
    assert "stays behind" in (made.path / "README.md").read_text(encoding="utf-8")
