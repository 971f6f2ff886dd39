"""Companion files of a checkpoint, which go wherever its model goes: tokenizers, processors, templates, licences.

Families keep their vocabularies in files of many names, so what stays behind is listed here and not what goes along.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runtime.checkpoint.locate import is_checkpoint_file, leads_out

#: Files that tokenizers are made of; exports that are directories for transformers or for `runtime.load` have them too.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.model", "sentencepiece.bpe.model",
    "spm.model", "source.spm", "target.spm", "tekken.json",
)  # fmt: skip
#: Larger files are no tokenizers.
MAXIMUM_BYTES = 256 * 2**20
# Weights in any format (a run writes its own), pickles among them; and code, which is never carried along without being asked for.
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".keras", ".msgpack", ".onnx", ".onnx_data", ".onnx.data",
    ".gguf", ".ggml", ".npz", ".npy", ".ot", ".tflite", ".pdparams", ".nemo", ".mlmodel", ".engine", ".plan", ".index.json", ".index",
)  # fmt: skip
_CODE = (
    ".py", ".pyc", ".pyi", ".ipynb", ".so", ".dll", ".dylib", ".exe", ".sh", ".bat", ".ps1", ".js", ".c", ".cpp", ".cu",
)  # fmt: skip
# What a run or an export writes itself, and what others say of how weights are compressed, which is another way in what is written.
_OWN = (
    "readme.md", "config.json", "compress.json", "compress.log", "run.json", "report.html", "recipe.yaml", "drafter.json", "export.json",
    "quantize_config.json", "quant_config.json", "hf_quant_config.json", "adapter_config.json",
)  # fmt: skip
# What sentence-transformers says about pooling; its modules have a folder each.
_NESTED = "[0-9]*_*/config.json"


def companions(directory: Path) -> list[Path]:
    """Files of a checkpoint directory that belong to it beside config.json and weights, sorted."""
    return [file for file in _candidates(directory) if _why_not(file, directory) is None]


def left_behind(directory: Path) -> dict[str, str]:
    """{name: why} of files that would be companions and cannot be."""
    found = ((file.name, _why_not(file, directory)) for file in _candidates(directory))
    return {name: reason for name, reason in found if reason is not None}


def _candidates(directory: Path) -> Iterable[Path]:
    for file in sorted([*directory.iterdir(), *directory.glob(_NESTED)]):
        name = file.name.lower()
        named = name not in _OWN and not name.startswith(".") and not name.endswith((*_WEIGHTS, *_CODE))
        if (named or file.parent != directory) and not file.is_dir():
            yield file


def _why_not(file: Path, directory: Path) -> str | None:
    """Why a file stays where it is; None: it does not."""
    if not file.is_file():
        return "it is no regular file, or a link to nothing"
    if leads_out(file, directory) and not is_checkpoint_file(file):
        return "it is a link that leads out of the directory"
    size = file.stat().st_size
    return f"it has {size} bytes, and at most {MAXIMUM_BYTES} are taken along" if size > MAXIMUM_BYTES else None
