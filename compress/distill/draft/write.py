"""A draft's directory: a Hugging Face checkpoint that also loads by itself, and `draft.json`, which says what it is a draft of.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.core.files import write_json
from compress.distill.draft.directory import draft_directory, sums
from compress.distill.draft.student import check_kept
from runtime.checkpoint.checkpoint import read_json
from runtime.drafting.drafters.draft_model import DRAFT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT = "kept_tokens.safetensors"
SCHEMA_VERSION = 1


def write_draft(
    directory: str | Path,
    model: PreTrainedModel,
    facts: Mapping[str, Any],
    *,
    method: str,
    target: str,
    dtype: torch.dtype = torch.bfloat16,
    kept: torch.Tensor | None = None,
    depths: Sequence[int] | None = None,
    parallel: Mapping[str, int] | None = None,
) -> Path:
    """Write a draft; the directory is there whole or not at all.

    Args:
        directory: new, or an earlier draft's, which is replaced.
        model: the draft. It is not changed.
        facts: JSON-able: acceptance before and after, the curve, ...
        method: how it was made.
        target: fingerprint of its target (`runtime.checkpoint.checkpoint.Checkpoint.fingerprint`).
        dtype: of the stored weights.
        kept, depths, parallel: see above.

    Returns:
        The directory.

    Raises:
        RequestError: the directory holds something else, or what is given does not fit the model.
    """
    directory = Path(directory)
    config: Any = model.config.get_text_config(decoder=True)
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION, "method": method, "target": target, "vocabulary": int(config.vocab_size),
        "layers": int(config.num_hidden_layers), "facts": dict(facts),
    }  # fmt: skip
    if depths is not None:
        content["depths"] = [int(depth) for depth in depths]
    if parallel is not None:
        content["parallel"] = {"mask_token": int(parallel["mask_token"]), "tokens": int(parallel["tokens"])}
    ids = None if kept is None else check_kept(kept, int(config.vocab_size))
    with draft_directory(directory, content) as temporary:
        _save(model, temporary, dtype)
        if ids is not None:
            from safetensors.torch import save_file

            save_file({"kept_tokens": ids.to(torch.int32).cpu()}, temporary / KEPT)
            content["kept_tokens"] = KEPT
    return directory


def _save(model: PreTrainedModel, directory: Path, dtype: torch.dtype) -> None:
    stored: Any = copy.deepcopy(model)
    stored.to(dtype)
    stored.config.dtype = dtype
    with quiet_transformers():
        stored.save_pretrained(directory)


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


def note_facts(directory: Path, facts: Mapping[str, Any], **more: Any) -> None:
    """Put what was measured, and files that were added, into a draft.json that is there already."""
    content = {**read_json(directory / DRAFT), **more, "facts": dict(facts)}
    write_json(directory / DRAFT, {**content, "files": sums(directory)})
