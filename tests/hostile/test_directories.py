"""Directories that come from elsewhere: code that is brought along, pickles, links and names that lead out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import compress
import runtime
from compress.cli import main
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import ArtifactError

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from pathlib import Path
Path({marker!r}).write_text("code was run")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "evil"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(params=["unknown model_type", "known model_type", "tokenizer only"])
def with_code(request: Any, tiny_llama: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint that brings code, and the file that appears when it is run."""
    path, marker = Path(shutil.copytree(tiny_llama(), tmp_path / "model")), tmp_path / "hacked"
    (path / "evil.py").write_text(CODE.format(marker=str(marker)), encoding="utf-8")
    config = json.loads((path / "config.json").read_text())
    if request.param != "tokenizer only":
        config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        if request.param == "unknown model_type":
            config |= {"model_type": "evil", "architectures": ["Model"]}
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    own = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}, "tokenizer_class": "Tokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer | own))
    return path, marker


@pytest.mark.slow
def test_code_that_a_checkpoint_brings_is_not_run(
    with_code: tuple[Path, Path], tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By no command, unless the command line says so; neither a recipe nor an artifact can say it."""
    path, marker = with_code
    recipe = {
        "name": "x",
        "model": str(path),
        "calibration": {"data": str(tiny_text), "samples": 4, "sequence_length": 16},
        "stages": [{"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}],
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    commands = [
        ["plan", str(file)], ["apply", str(file), "--output", str(tmp_path / "out"), "--quiet"], ["inspect", str(path)],
        ["generate", str(path), "x", "--max-new-tokens", "1"], ["eval", str(path), "--text", str(tiny_text), "--sequence-length", "32"],
        ["export", str(path), "--target", "huggingface", "--output", str(tmp_path / "export"), "--quiet"],
    ]  # fmt: skip
    for command in commands:
        code = main(command)
        said = capsys.readouterr().err
        assert not marker.exists(), f"{command[0]} ran it"
        assert code in (0, 1, 2)
        assert "Traceback" not in said
        assert "unexpected" not in said, said
    for call in (runtime.load, Checkpoint, Artifact):
        with contextlib.suppress(ArtifactError):
            call(path)
        assert not marker.exists(), call
    for setting in ({"trust_remote_code": True}, {"calibration": {**recipe["calibration"], "trust_remote_code": True}}):
        file.write_text(yaml.safe_dump({**recipe, **setting}))
        assert main(["plan", str(file)]) == 2
        assert "trust_remote_code" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.slow
def test_a_model_that_needs_its_code_is_refused_in_a_sentence_that_says_how_to_allow_it(
    tiny_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, marker = Path(shutil.copytree(tiny_llama(), tmp_path / "model")), tmp_path / "hacked"
    (path / "evil.py").write_text(CODE.format(marker=str(marker)), encoding="utf-8")
    config = json.loads((path / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"}
    (path / "config.json").write_text(json.dumps(config | own | {"architectures": ["Model"]}))
    assert main(["generate", str(path), "x"]) == 2
    assert "needs Python code of its own" in (said := capsys.readouterr().err)
    assert "--trust-remote-code" in said
    assert not marker.exists()
    # In a process of its own, since here it would stay imported; with a home of its own, where transformers copies it.
    command = [
        sys.executable,
        "-m",
        "compress.cli",
        "generate",
        str(path),
        "x",
        "--max-new-tokens",
        "1",
        "--trust-remote-code",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert marker.exists(), "the user allowed it"


def test_advice_about_code_can_be_followed_where_it_is_given(
    tiny_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only commands that have --trust-remote-code name it, and nobody is asked at a terminal."""
    path, marker = Path(shutil.copytree(tiny_llama(), tmp_path / "model")), tmp_path / "hacked"
    (path / "evil.py").write_text(CODE.format(marker=str(marker)), encoding="utf-8")
    config = json.loads((path / "config.json").read_text())
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    recipe = tmp_path / "recipe.yaml"
    stages = [{"quantize": {"method": "gptq", "bits": 4, "group_size": 32}}]
    recipe.write_text(yaml.safe_dump({"name": "x", "model": str(path), "stages": stages}))
    own = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}, "tokenizer_class": "Other"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer | own))
    for model_too in (False, True):
        if model_too:
            named = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
            (path / "config.json").write_text(json.dumps(config | {"auto_map": named, "model_type": "evil"}))
        for command, allows in ((["plan", str(recipe)], False), (["generate", str(path), "x"], True)):
            assert main(command) == 2
            said = capsys.readouterr().err
            assert "needs Python code of its own" in said
            assert ("--trust-remote-code" in said) is allows
    assert not marker.exists()


class Boom:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt", "model.pkl"])
def test_a_pickle_is_never_opened(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = Path(shutil.copytree(tiny_llama(), tmp_path / "model"))
    (path / "model.safetensors").unlink()
    torch.save({"x": Boom()}, path / name)
    monkeypatch.chdir(tmp_path)

    def plan(directory: Path) -> Any:
        return compress.plan({"name": "x", "model": str(directory), "stages": [{"quantize": {"method": "rtn"}}]})

    for call in (runtime.load, Checkpoint, Artifact, plan):
        with pytest.raises(ArtifactError, match=f"pickle.*{name}"):
            call(path)
    assert not (tmp_path / "hacked").exists()


# ---------------------------------------------------------------- links
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "compress.json", "draft/model.safetensors", "draft"])
def test_a_link_out_of_an_artifact_is_refused(tiny_artifact: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(tiny_artifact, tmp_path / "model"))
    (path / "draft").mkdir()
    shutil.copyfile(next(path.glob("*.safetensors")), path / "draft" / "model.safetensors")
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    for call in (runtime.load, Checkpoint, Artifact):
        with pytest.raises(ArtifactError, match=f"{name}.*elsewhere"):
            call(path)


def test_a_plain_checkpoint_may_be_made_of_links(
    tiny_llama: Callable[..., Path], tmp_path: Path, tiny_text: Path
) -> None:
    """As clusters and caches have them. What is made of it holds the files themselves."""
    farm = tmp_path / "farm"
    farm.mkdir()
    for file in tiny_llama().iterdir():
        (farm / file.name).symlink_to(file)
    (tmp_path / "secret").write_text("ours")
    (farm / "LICENSE").symlink_to(tmp_path / "secret")
    expected = runtime.load(tiny_llama(), device="cpu").generate([1, 2, 3], max_new_tokens=3)
    assert runtime.load(farm, device="cpu").generate([1, 2, 3], max_new_tokens=3) == expected
    recipe = {"name": "x", "model": str(farm), "stages": [{"quantize": {"method": "rtn", "bits": 8, "group_size": 32}}]}
    made = compress.apply(recipe, output=tmp_path / "out", quiet=True)
    assert (made.path / "tokenizer.json").read_bytes() == (farm / "tokenizer.json").read_bytes()
    assert not any(file.is_symlink() for file in made.path.rglob("*"))
    assert not (made.path / "LICENSE").exists(), "a name that no checkpoint is read from"
    assert any("LICENSE stays behind" in warning for warning in made.warnings)


def test_links_that_stay_inside_and_those_of_the_hubs_cache_are_followed(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_llama(), tmp_path / "model"))
    expected = runtime.load(path, device="cpu").generate([1, 2, 3], max_new_tokens=3)
    (path / "model.safetensors").rename(path / "real")
    (path / "model.safetensors").symlink_to("real")
    assert runtime.load(path, device="cpu").generate([1, 2, 3], max_new_tokens=3) == expected
    hub = tmp_path / "hub" / "models--a--b"
    (hub / "blobs").mkdir(parents=True)
    snapshot = hub / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(tiny_llama().iterdir())):
        shutil.copyfile(file, hub / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    assert runtime.load(snapshot, device="cpu").generate([1, 2, 3], max_new_tokens=3) == expected
    (tmp_path / "local").mkdir()
    for file in snapshot.iterdir():
        (tmp_path / "local" / file.name).symlink_to(file.resolve())
    assert runtime.load(tmp_path / "local", device="cpu").generate([1, 2, 3], max_new_tokens=3) == expected


def test_a_pipe_is_not_waited_for(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        path = Path(shutil.copytree(tiny_llama(), tmp_path / name))
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(ArtifactError):
            Checkpoint(path)


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 2**53), ("head_dim", 2**40), ("moe_num_experts", 10**9), ("hidden_size", 2**62)],
)
def test_a_config_without_end_is_refused(
    tiny_llama: Callable[..., Path], tmp_path: Path, field: str, value: int
) -> None:
    path = Path(shutil.copytree(tiny_llama(), tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ArtifactError, match=rf"{field} is {value}"):
        runtime.load(path, device="cpu")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", 0, "hidden_size is 0; expected an integer from 1 to 16,777,216"),
        ("num_attention_heads", 0, "num_attention_heads is 0; expected an integer from 1 to 16,384"),
        ("num_hidden_layers", "many", "num_hidden_layers is 'many'; expected an integer"),
        ("vocab_size", -1, "vocab_size is -1; expected"),
        ("intermediate_size", 12.5, "intermediate_size is 12.5; expected"),
        ("num_hidden_layers", True, "num_hidden_layers is true; expected"),
        ("num_key_value_heads", 3, "num_attention_heads is 4, which must be a multiple of num_key_value_heads, 3"),
        ("num_attention_heads", 6, "hidden_size is 64, which must be a multiple of num_attention_heads, 6"),
        ("rms_norm_eps", "small", "'rms_norm_eps' expected float, got str"),
    ],
)
def test_a_nonsense_field_is_refused_by_name(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    field: str,
    value: Any,
    words: str,
) -> None:
    path = Path(shutil.copytree(tiny_llama(), tmp_path / "model"))
    config = {key: value for key, value in json.loads((path / "config.json").read_text()).items() if key != "head_dim"}
    if field == "num_attention_heads" and value == 6:
        config["num_key_value_heads"] = 6
    (path / "config.json").write_text(json.dumps(config | {field: value}))
    recipe = {"name": "x", "model": str(path), "stages": [{"quantize": {"method": "rtn"}}]}
    for call in (
        lambda: runtime.load(path, device="cpu"),
        lambda: compress.plan(recipe),
        lambda: compress.apply(recipe),
    ):
        with pytest.raises(ArtifactError, match=re.escape(words)) as refused:
            call()
        assert str(path / "config.json") in str(refused.value)
    if words.endswith("expected") or "; expected" in words:
        assert main(["inspect", str(path)]) == 2
        assert words in capsys.readouterr().err


def test_a_file_name_that_is_no_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for name, words in (("x" * 5000, "longer than names can be"), ("../a.safetensors", "inside the directory")):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ArtifactError, match=words):
            Checkpoint(tmp_path)
    assert load_file(tmp_path / "a.safetensors")["a"].sum() == 2
