"""Pooling of hidden states into one vector a text, as the checkpoint's sentence-transformers files describe it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import torch

from runtime.checkpoint.checkpoint import read_json, read_json_value
from runtime.errors import ArtifactError

Mode = Literal["mean", "cls", "max"]
MODULES = "modules.json"
SETTINGS = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
_MODES: dict[str, Mode] = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
_FLAG = "pooling_mode_"


@dataclass(frozen=True)
class Pooling:
    """How hidden states become an embedding.

    Attributes:
        mode: "mean" over the tokens, "cls" (the first token) or "max" over the tokens.
        max_length: tokens a text is cut to; None: the model's context.
        prefix: what every text begins with (the default prompt).
        lower_case: texts are lowered before they become tokens.
        refusal: why texts of this checkpoint cannot be embedded here, or empty.
    """

    mode: Mode = "mean"
    max_length: int | None = None
    prefix: str = ""
    lower_case: bool = False
    refusal: str = ""

    def __call__(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """One vector a row: float `[batch, seq, hidden]` and mask `[batch, seq]` (1 = token; None: all) to `[batch, hidden]`."""
        if mask is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        if self.mode == "cls":
            first = mask.long().argmax(dim=1)
            return hidden[torch.arange(len(hidden), device=hidden.device), first]
        tokens = mask[..., None].bool()
        if self.mode == "max":
            return hidden.masked_fill(~tokens, -torch.inf).amax(dim=1)
        # What is at padding may be anything, so it is replaced, not multiplied by 0.
        return hidden.masked_fill(~tokens, 0.0).sum(dim=1) / tokens.sum(dim=1).clamp_min(1)


def read_pooling(path: Path) -> Pooling:
    """The pooling of the directory `path`: the mean unless `modules.json` and what it names say otherwise.

    Raises:
        ArtifactError: one of the files is damaged.
    """
    settings = read_json(path / SETTINGS) if (path / SETTINGS).is_file() else {}
    length = settings.get("max_seq_length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ArtifactError(f"{path / SETTINGS}: max_seq_length must be a positive integer, not {length!r}")
    if not (path / MODULES).is_file():
        return Pooling(max_length=length)
    prompts = read_json(path / PROMPTS) if (path / PROMPTS).is_file() else {}
    named = prompts.get("prompts")
    prefix = named.get(prompts.get("default_prompt_name"), "") if isinstance(named, dict) else ""
    if not isinstance(prefix, str):
        raise ArtifactError(f"{path / PROMPTS}: the default prompt must be a text, not {prefix!r}")
    mode: Mode = "mean"
    for module, folder in _modules(path):
        if module == "Pooling":
            config = read_json(path / folder / "config.json")
            flags = [
                key.removeprefix(_FLAG) for key, value in config.items() if key.startswith(_FLAG) and value is True
            ]
            found = [_MODES.get(flag, flag) for flag in flags]
            found += [config["pooling_mode"]] if config.get("pooling_mode") in _MODES.values() else []
            if len(found) != 1 or found[0] not in _MODES.values():
                said = ", ".join(found) or "nothing that is known"
                return Pooling(
                    refusal=f"{path / folder / 'config.json'} asks for pooling by {said}; mean, cls or max is supported"
                )
            mode = found[0]  # type: ignore[assignment]
        elif module not in ("Transformer", "Normalize"):
            return Pooling(refusal=f"{path / MODULES} has a {module} module, which this runtime does not compute")
    return Pooling(mode, length, prefix, settings.get("do_lower_case") is True)


def _modules(path: Path) -> list[tuple[str, str]]:
    """(class name, folder) of the modules that modules.json lists."""
    file = path / MODULES
    content = read_json_value(file)
    found = []
    for entry in content if isinstance(content, list) else [None]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("type", "path")):
            raise ArtifactError(f"{file} must be a list of modules with a type and a path each")
        folder = PurePosixPath(entry["path"])
        if folder.is_absolute() or ".." in folder.parts or "\\" in entry["path"] or ":" in entry["path"]:
            raise ArtifactError(f"{file} names the folder {entry['path']!r}: folders must lie inside the directory")
        found.append((entry["type"].rpartition(".")[2], entry["path"]))
    return found
