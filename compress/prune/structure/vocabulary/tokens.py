"""Cut vocabulary: the tokens that stay, and the files of a checkpoint with their new ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.prune.structure.vocabulary.config_ids import renumber_config, renumbered
from compress.prune.structure.vocabulary.vocabulary import FILE, Vocabulary, processed
from runtime.checkpoint.checkpoint import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Vocabularies in formats of other libraries, which tokenizer.json stands for.
_DROPPED = ("*.model", "*.spm", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class Tokens:
    """A cut vocabulary.

    Attributes:
        vocabulary: the whole one.
        new: {id: new id} of the tokens that stay.
    """

    vocabulary: Vocabulary
    new: Mapping[int, int]

    @property
    def kept(self) -> torch.Tensor:
        """int64 `[new size]`: the id that each new one had."""
        return torch.tensor(sorted(self.new, key=lambda old: self.new[old]), dtype=torch.int64)

    def change(self, number: int) -> int:
        """The new id; an id that is no row of the model stays."""
        return self.new[number] if 0 <= number < self.vocabulary.size else number

    def config(self, config: PretrainedConfig, smaller: PretrainedConfig) -> PretrainedConfig:
        """`smaller`, which is `config` but for its sizes, with new ids in the place of those that `config` names."""
        renumber_config(smaller, config, self.change)
        return smaller

    def write(self, directory: Path) -> None:
        """Rewrite the files of a checkpoint that hold ids, except config.json, in place; drop vocabularies in other formats."""
        content = self._tokenizer()
        _write(directory / FILE, content)
        for name in ("generation_config.json", "tokenizer_config.json"):
            if (directory / name).is_file():
                _write(directory / name, self._config(read_json(directory / name)))
        if (directory / "added_tokens.json").is_file():
            found = read_json(directory / "added_tokens.json")
            _write(directory / "added_tokens.json", {token: self.change(number) for token, number in found.items()})
        model = content["model"]
        if (directory / "vocab.json").is_file():
            _write(directory / "vocab.json", model["vocab"])
        if (directory / "vocab.txt").is_file():
            lines = sorted(model["vocab"], key=lambda token: model["vocab"][token])
            (directory / "vocab.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if (directory / "merges.txt").is_file():
            lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
            (directory / "merges.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for pattern in _DROPPED:
            for file in directory.glob(pattern):
                file.unlink()

    def _tokenizer(self) -> dict[str, Any]:
        whole, old = self.vocabulary, self.vocabulary.content
        own = {number: new for number, new in self.new.items() if number in whole.model.tokens}
        added = [{**entry, "id": self.change(whole.added[entry["content"]])} for entry in old.get("added_tokens") or []]
        padding = old.get("padding")
        return {
            **old,
            "added_tokens": sorted(added, key=lambda entry: entry["id"]),
            "post_processor": processed(old.get("post_processor"), self.change),
            "padding": None if padding is None else {**padding, "pad_id": self.change(int(padding["pad_id"]))},
            "model": whole.model.without(own),
        }

    def _config(self, values: dict[str, Any]) -> dict[str, Any]:
        result = renumbered(values, self.change)
        decoder = values.get("added_tokens_decoder")
        if decoder is not None:
            result["added_tokens_decoder"] = {str(self.change(int(old))): entry for old, entry in decoder.items()}
        return result


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
