"""Directories of drafts: a Hugging Face checkpoint that also loads by itself, or one safetensors file, and `draft.json`.

draft.json:
    schema_version  1
    method          how it was made, as a recipe says it
    target          fingerprint of the checkpoint it proposes for
    vocabulary      ids it takes; the target's
    layers          of the model
    depths          the numbers of first layers that are drafts by themselves (nested drafts); absent: only all
    parallel        {"mask_token", "tokens"} of a draft that proposes several tokens in a pass; absent: one by one
    kept_tokens     file with "kept_tokens", int32 `[k]`, ascending: the ids that it proposes (`vocab_trim`); absent: all. The checkpoint
                    has its whole head all the same (a tied one is its embeddings): whoever runs it takes these rows of it, and logit
                    i is that of kept_tokens[i]
    accept_head     true: accept_head.safetensors foresees what will be accepted (`accept_head`); absent: there is none
    facts           what was measured, plain data
    files           {name: {"bytes", "sha256"}} of all others
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from compress.core.files import directory_beside, disk_errors, sha256, write_json
from runtime.checkpoint.checkpoint import read_json
from runtime.drafting.drafters.draft_model import DRAFT
from runtime.errors import RequestError
from runtime.system.directories import let_others_read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT = "kept_tokens.safetensors"
SCHEMA_VERSION = 1


@contextmanager
def draft_directory(directory: Path, content: Mapping[str, Any]) -> Iterator[Path]:
    """Yield an empty directory for the files of a draft; when they are there it takes the place of `directory`.

    Args:
        directory: new, or an earlier draft's, which is replaced.
        content: of draft.json, with "method" and "target"; the version and the sizes and sums of the files are added to it.

    Raises:
        RequestError: the directory holds something else, or there is no target. CompressError: the disk is full.
    """
    if not content["target"]:
        raise RequestError("a draft needs its target's fingerprint: another model's would not be refused")
    if directory.exists() and not (directory / DRAFT).is_file() and (directory.is_file() or any(directory.iterdir())):
        raise RequestError(f"{directory} is not empty and holds no draft; choose another directory")
    with disk_errors(f"writing {directory}"), directory_beside(directory) as temporary:
        yield temporary
        for file in temporary.iterdir():
            let_others_read(file)
        write_json(temporary / DRAFT, {"schema_version": SCHEMA_VERSION, **content, "files": file_sums(temporary)})


def write_draft(
    directory: Path,
    model: PreTrainedModel,
    content: Mapping[str, Any],
    kept: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a draft that is a model; the directory is there whole or not at all.

    Args:
        directory: new, or an earlier draft's, which is replaced.
        model: the draft. It is not changed.
        content: of draft.json: "method", "target", "facts", ...
        kept: its trimmed vocabulary, int `[k]`; see above.
        dtype: of the stored weights.

    Raises:
        RequestError: the directory holds something else, or there is no target.
    """
    config: Any = model.config.get_text_config(decoder=True)
    content = {"vocabulary": int(config.vocab_size), "layers": int(config.num_hidden_layers), **content}
    if kept is not None:
        content["kept_tokens"] = KEPT
    with draft_directory(directory, content) as temporary:
        stored: Any = copy.deepcopy(model).to(dtype)  # type: ignore[arg-type]
        stored.config.dtype = dtype
        with quiet_transformers():
            stored.save_pretrained(temporary)
        if kept is not None:
            save_file({"kept_tokens": kept.to("cpu", torch.int32)}, temporary / KEPT)


def write_tensors(
    directory: Path,
    file: str,
    tensors: Mapping[str, torch.Tensor],
    content: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a draft that is some tensors; the directory is there whole or not at all.

    Args:
        directory, content: as of `write_draft`.
        file: of safetensors. tensors: parameters are stored in `dtype`, all others (rotations, ids) as they are.
    """
    stored = {
        name: value.detach().to("cpu", dtype if isinstance(value, torch.nn.Parameter) else value.dtype).contiguous()
        for name, value in tensors.items()
    }
    with draft_directory(directory, content) as temporary:
        save_file(stored, temporary / file)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers: a run has its own."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def note(directory: Path, **content: Any) -> None:
    """Put more into a draft.json that is there already, and the sums of files that were added."""
    write_json(directory / DRAFT, {**read_json(directory / DRAFT), **content, "files": file_sums(directory)})


def file_sums(directory: Path) -> dict[str, dict[str, Any]]:
    """{name: {"bytes", "sha256"}} of all files but draft.json."""
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.name != DRAFT)
    return {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}
