"""Writer of a Hugging Face checkpoint, part by part, for stages that change a whole model."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from compress.core.files import disk_errors, read_sealed, sha256, write_json, write_sealed, written_beside
from compress.model.couplings import shapes
from runtime.checkpoint.checkpoint import INDEX, SINGLE, Checkpoint
from runtime.checkpoint.companions import companions
from runtime.checkpoint.headers import pack_header
from runtime.formats.quantization_config import OWN_METHOD
from runtime.modeling.layer_sizes import is_ours, uniform
from runtime.modeling.skeleton import build_skeleton, tied_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from compress.model.streamed import StreamedModel


# The small files that make a checkpoint complete.


def copy_companions(source: Path, target: Path) -> None:
    """Copy them from one checkpoint directory to another."""
    for file in companions(source):
        place = target / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        with written_beside(place) as temporary:
            shutil.copyfile(file, temporary)


def write_index(directory: Path, stored: Sequence[tuple[str, str, int]]) -> None:
    """The index of a checkpoint's shards, of the name, the shard and the bytes of each tensor."""
    size = sum(size for _, _, size in stored)
    shards = {name: shard for name, shard, _ in stored}
    write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": shards})


def guarded(
    streamed: StreamedModel, config: Mapping[str, Any], compressed: Collection[str], stored: Collection[str]
) -> set[str]:
    """Names of weights that a reader who does not know how an artifact stores them would not find, or take codes for; see
    `runtime.checkpoint.guard`.

    Args:
        streamed: the model. config: what is in the artifact's config.json. compressed: the model's names of packed layers.
        stored: names of the artifact's tensors.
    """
    found: set[str] = set()
    if (config.get("quantization_config") or {}).get("quant_method") == OWN_METHOD:
        found = {f"{streamed.checkpoint.published_module(name)}.weight" for name in compressed}
    if is_ours(streamed.model):  # other readers build every layer alike, also those whose parts were removed
        alike = build_skeleton(uniform(streamed.config), streamed.dtype)
        packed = {f"{name}.weight" for name in compressed}
        found |= alike.state_dict().keys() - packed - tied_names(alike).keys() - set(stored)
    return found


Form = tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], torch.dtype]]]
"""What is in a config.json; and of each stored tensor its shape and dtype."""

#: Why a layer for multi-token prediction is not in a checkpoint whose layers have other shapes, or another hidden state.
PREDICTING = "a layer for multi-token prediction, which fits the model as it was before"
_PREDICTING = {"num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"}  # how configs call their number


def shard_name(number: int, total: int) -> str:
    """File name of shard `number` (from 1) of `total`, as transformers names them."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


class PlainWriter:
    """Writes one shard a part, in order; shards that an interrupted run has finished are recognized by their SHA-256.

    Args:
        directory: of the checkpoint. parts: how many there will be. model: whose tensors they are, on meta.
    """

    def __init__(self, directory: Path, parts: int, model: PreTrainedModel) -> None:
        self.directory, self.parts, self._model = directory, parts, model
        self._places = set(model.state_dict())
        directory.mkdir(parents=True, exist_ok=True)

    def done(self) -> int:
        """Parts that are there as they were written, the first so many."""
        return next((part for part in range(self.parts) if not self._is_whole(part)), self.parts)

    def forget(self, parts: range) -> None:
        """These are written again."""
        for part in parts:
            self._record_path(part).unlink(missing_ok=True)

    def facts(self, part: int) -> dict[str, Any]:
        """The facts that a part was written with."""
        return self._record(part)["facts"]

    def write(self, part: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """One part, under the model's names; `facts` are JSON-able."""
        tensors = self._published(tensors)
        shard = shard_name(part + 1, self.parts)
        with disk_errors(f"writing {self.directory / shard}"), written_beside(self.directory / shard) as temporary:
            save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, temporary, {"format": "pt"})
        names = {name: value.numel() * value.element_size() for name, value in tensors.items()}
        record = {"shard": shard, "sha256": sha256(self.directory / shard), "bytes": names, "facts": dict(facts)}
        write_sealed(self._record_path(part), record)

    def _published(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As checkpoints of the family are published, which is how other engines read them: renamed, experts one by one. What the model
        has no place for keeps its name. A model whose layers differ is one that no other engine has, and transformers cannot convert it."""
        if is_ours(self._model):
            return dict(tensors)
        from transformers.core_model_loading import revert_weight_conversion

        own = {name: value for name, value in tensors.items() if name in self._places}
        return revert_weight_conversion(self._model, own) | {n: v for n, v in tensors.items() if n not in own}

    def finish(self, source: Path, config: Mapping[str, Any]) -> None:
        """Index, config.json, tokenizer and what else belongs to a checkpoint; the records of the parts go."""
        records = [self._record(part) for part in range(self.parts)]
        stored = [(name, record["shard"], size) for record in records for name, size in record["bytes"].items()]
        with disk_errors(f"writing {self.directory}"):
            write_index(self.directory, stored)
            copy_companions(source, self.directory)
            write_json(self.directory / "config.json", dict(config))
        for part in range(self.parts):
            self._record_path(part).unlink()

    def _is_whole(self, part: int) -> bool:
        record = self._record(part)
        shard = self.directory / record.get("shard", "")
        return shard.is_file() and sha256(shard) == record["sha256"]

    def _record(self, part: int) -> dict[str, Any]:
        """The record of a part; empty where there is none, or a damaged one."""
        return read_sealed(self._record_path(part)) or {}

    def _record_path(self, part: int) -> Path:
        return self.directory / f".part-{part:05d}.json"


def config_dict(source: Checkpoint, before: Any, after: Any) -> dict[str, Any]:
    """config.json of a model that another has become: what the source's says, with the values that `after` has otherwise than `before`."""
    found = _changed(source.config, before.to_dict(), after.to_dict(), after)
    if PREDICTING in getattr(source, "dropped", {}).values():
        for part in [found, *(value for value in found.values() if isinstance(value, dict))]:
            part |= dict.fromkeys(_PREDICTING & part.keys(), 0)
    return found


def _changed(
    written: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], config: Any
) -> dict[str, Any]:
    # A size may go by several names (num_experts, num_local_experts); it changes under those that the file knows.
    others: Mapping[str, str] = getattr(config, "attribute_map", None) or {}
    result = {key: value for key, value in written.items() if key in after or key not in before}
    for key, value in after.items():
        if before.get(key) == value:
            continue
        inner, part = written.get(key), vars(config).get(key)
        if isinstance(inner, dict) and isinstance(before.get(key), dict) and hasattr(part, "to_dict"):
            result[key] = _changed(inner, before[key], value, part)
            continue
        names = [name for name in (key, *(n for n, real in others.items() if real == key)) if name in written]
        result |= dict.fromkeys(names or [key], value)
    return result


def zeros(directory: Path, streamed: StreamedModel, config: PretrainedConfig) -> Form:
    """Write a checkpoint of zeros, which takes no room on the disk; what was written.

    Args:
        streamed: the whole model. config: of a smaller one.
    """
    source = streamed.checkpoint
    model = build_skeleton(config, torch.float32, stored=source.names())
    tensors = {name: (shape, source.dtype(name)) for name, shape in shapes(model).items() if source.has(name)}
    described = config_dict(source, streamed.config, config)
    directory.mkdir(parents=True, exist_ok=True)
    write_zeros(directory, source.path, described, tensors)
    return described, tensors


def write_zeros(
    directory: Path, source: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """A checkpoint of these tensors, of zeros that take no room on the disk, with the companions of another."""
    header, _ = pack_header(tensors)
    with (directory / SINGLE).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values()))
    copy_companions(source, directory)
    write_json(directory / "config.json", config)
