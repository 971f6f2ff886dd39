"""What of a checkpoint's directory goes along with its weights, and what of it is looked at before a run begins."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compress
from compress.prune.structure.vocabulary import tokens
from export import export
from runtime.checkpoint import companions
from runtime.errors import ArtifactError

RTN = {"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}
CARRIED = (
    "LICENSE", "LICENSE.txt", "NOTICE.md", "USE_POLICY.md", "sentencepiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm",
    "spm.model", "tekken.json", "video_preprocessor_config.json", "image_processor_config.json", "preprocessor_config.json",
    "chat_template.jinja", "qwen.tiktoken", "vocab.bpe", "some_later_tokenizer.dat",
)  # fmt: skip
LEFT = (
    "pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "tf_model.h5", "flax_model.msgpack", "model.onnx", "model.gguf",
    "model.ckpt", "consolidated.00.pth", "other.safetensors", "modeling_evil.py", "setup.sh", ".gitattributes", "compress.log",
    "drafter.json", "hf_quant_config.json",
)  # fmt: skip


def files(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


def test_whatever_is_no_weight_and_no_code_goes_along(
    make_checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path
) -> None:
    path = make_checkpoint()
    for name in (*CARRIED, *LEFT):
        (path / name).write_bytes(f"of {name}".encode())
    made = compress.apply(recipe(path, RTN), output=tmp_path / "out", quiet=True)
    for name in CARRIED:
        assert (made.path / name).read_bytes() == f"of {name}".encode()
    assert not any((made.path / name).exists() for name in LEFT if name != "compress.log")
    assert (made.path / "compress.log").read_bytes() != b"of compress.log"
    assert not [warning for warning in made.warnings if "stays behind" in warning]
    assert set(CARRIED) <= made.manifest["files"].keys()
    exported = export(made.path, "huggingface", tmp_path / "exported", verify=False, quiet=True)
    assert set(CARRIED) <= files(exported.path)
    assert not {"recipe.yaml", "compress.json", "compress.log", "report.html"} & files(exported.path)


def test_what_cannot_go_along_is_named(
    make_checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint()
    monkeypatch.setattr(companions, "MAXIMUM_BYTES", 2**20)
    (path / "large.dat").write_bytes(bytes(2**20 + 1))
    (tmp_path / "secret").write_text("ours")
    (path / "LICENSE").symlink_to(tmp_path / "secret")
    (path / "NOTICE").symlink_to(path / "nothing")
    (path / "own").write_text("theirs")
    (path / "alias").symlink_to("own")
    os.mkfifo(path / "pipe")
    made = compress.apply(recipe(path, RTN), output=tmp_path / "out", quiet=True)
    assert not {"large.dat", "LICENSE", "NOTICE", "pipe"} & files(made.path)
    assert (made.path / "alias").read_text() == "theirs"
    assert not (made.path / "alias").is_symlink()
    told = {text.split(" stays behind: ")[0]: text for text in made.warnings if "stays behind" in text}
    assert {Path(name).name for name in told} == {"large.dat", "LICENSE", "NOTICE", "pipe"}
    assert "a link that leads out of the directory" in told[str(path / "LICENSE")]
    assert "1048577 bytes, and at most 1048576" in told[str(path / "large.dat")]


def test_links_into_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blob = tmp_path / "hub" / "models--a--b" / "blobs" / "0123"
    blob.parent.mkdir(parents=True)
    blob.write_text("licence")
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "LICENSE").symlink_to(blob)
    assert [file.name for file in companions.companions(snapshot)] == ["LICENSE"]
    assert companions.left_behind(snapshot) == {}


def test_vocabularies_of_other_libraries_do_not_outlive_a_cut() -> None:
    """They hold the tokens that are gone; tokenizer.json stands for them."""
    for name in ("tekken.json", "source.spm", "target.spm", "sentencepiece.model", "spm.model", "tokenizer.model"):
        assert any(Path(name).match(pattern) for pattern in tokens._DROPPED), name


# ---------------------------------------------------------------- generation_config.json
@pytest.mark.parametrize("value", [{"a": 1}, "end", [1, "2"], True])
def test_an_end_of_text_that_is_none_is_refused_before_a_run(
    make_checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path, value: Any
) -> None:
    path = make_checkpoint()
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    structure = {"structure": {"method": "magnitude", "remove": "ffn", "ratio": 0.25}}
    for stages in ([RTN], [structure, RTN]):
        with pytest.raises(ArtifactError, match="eos_token_id"):
            compress.plan(recipe(path, *stages))
        with pytest.raises(ArtifactError, match="eos_token_id"):
            compress.apply(recipe(path, *stages), output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_a_generation_config_without_end_is_not_read(
    make_checkpoint: Callable[..., Path], recipe: Any, tmp_path: Path
) -> None:
    path = make_checkpoint()
    with (path / "generation_config.json").open("wb") as file:
        file.truncate(3 * 10**9)  # of zeros, which take no room
    with pytest.raises(ArtifactError, match=r"generation_config\.json"):
        compress.apply(recipe(path, RTN), output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
