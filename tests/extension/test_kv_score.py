"""A calibrated KV score of another package: calibrated by `compress apply`, stored in the artifact, used by `runtime.load`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CHECKPOINT = Path(__file__).parents[2] / "recipes" / "checkpoints" / "recall-1m"
STAGE = {"evict": {"score": "expected-queries", "ratio": 0.5, "observe": 8}}
GENERATE = """
import json, sys
import runtime
model = runtime.load(sys.argv[1], device="cpu", kv_cache=json.loads(sys.argv[2]))
ids = model.generate(list(range(5, 205)), max_new_tokens=8, ignore_eos=True)
print(json.dumps({"ids": ids, "stats": {key: model.stats[key] for key in ("kv_cache", "cache_bytes")}}))
"""


@pytest.fixture(scope="module")
def artifact(extension, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kv")
    calibration = {"data": "bundled", "samples": 8, "sequence_length": 64, "batch_size": 4}
    recipe = {"name": "x", "model": str(CHECKPOINT), "calibration": calibration, "stages": [{"kv_cache": STAGE}]}
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    extension.compress("apply", folder / "recipe.yaml", "-o", folder / "out", "--device", "cpu", "-q")
    return folder / "out"


def test_what_was_calibrated_stands_in_the_artifact(artifact: Path) -> None:
    policy = json.loads((artifact / "compress.json").read_text(encoding="utf-8"))["kv_cache"]
    assert policy["evict"]["score"] == "expected-queries"
    queries = policy["calibrated"]["queries"]
    assert [len(queries), len(queries[0]), len(queries[0][0]), len(queries[0][0][0])] == [3, 2, 2, 64]
    assert len(policy["calibrated"]["facts"]["queries"]["norms"]) == 3
    assert any(abs(value) > 0.01 for value in queries[0][0][0])


@pytest.mark.slow
def test_a_loaded_model_evicts_by_it(extension, artifact: Path) -> None:
    own, plain = (json.loads(extension.python(GENERATE, artifact, policy).stdout) for policy in ("null", "{}"))
    assert own["stats"]["kv_cache"] == "expected-queries to 0.5 of the tokens"
    assert own["stats"]["cache_bytes"] < 0.75 * plain["stats"]["cache_bytes"]
    whole = {"evict": {**STAGE["evict"], "ratio": 1.0}}
    everything = json.loads(extension.python(GENERATE, artifact, json.dumps(whole)).stdout)
    assert everything["ids"] == plain["ids"], "a full budget evicts nothing"


@pytest.mark.slow
def test_without_its_calibration_it_is_refused(extension) -> None:
    done = extension.compress(
        "generate", CHECKPOINT, "x", "--kv-cache", json.dumps(STAGE), "--device", "cpu", check=False
    )
    assert done.returncode == 2
    assert "needs queries" in done.stderr


def test_it_is_listed_with_its_settings(extension) -> None:
    shown = json.loads(extension.compress("methods", "show", "expected-queries", "--json").stdout)
    assert shown["stage"] == "kv_cache evict.score"
    assert shown["needs"] == ["queries"]
    assert [field["name"] for field in shown["fields"]] == ["observe", "kernel", "trust"]
