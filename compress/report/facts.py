"""Facts of a report as plain data, read from an artifact's manifest and tensor headers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.core.files import read_object
from compress.core.run_directory import RECORD
from compress.evaluate.limits import exceeded
from runtime.checkpoint.artifact import Artifact
from runtime.errors import ArtifactError

PARTS = ("embeddings", "attention", "mlp", "norms", "output head", "other", "scales and indices")
"""Where bytes can be. The last one is what a compressed layer needs beside its values: scales, zero points, masks, shapes."""

_PART_PATTERNS = (
    ("norms", r"norm|(^|\.)ln(_|\d|\.|$)"),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|ffn|feed_forward|experts|moe|(^|\.)fc\d|dense_h_to_4h|dense_4h_to_h"),
    ("output head", r"lm_head|embed_out|(^|\.)output\.|classifier|(^|\.)score\."),
    ("embeddings", r"embed|(^|\.)w[tp]e\."),
)
_OVERHEAD = re.compile(r"\.(weight|input)_(scale|global_scale|zero_point|shape|g_idx|metadata|bitmap|row_offsets)$")

_CUT = "removed by an earlier stage"
"""Why whole tensors are gone that the recipe asked to remove, which is no warning."""

_LONGEST_KIND = 24
"""Characters of a layer's kind in a legend; more would leave no room for the chart."""


def part_of(tensor: str) -> str:
    """Which of `PARTS` a tensor of a transformers model belongs to, by its name."""
    for part, pattern in _PART_PATTERNS:
        if re.search(pattern, tensor):
            return part
    return "other"


@dataclass
class Facts:
    """All that the page shows.

    Attributes:
        path: the artifact's directory; its name is the page's title.
        manifest: content of compress.json.
        recipe: text of recipe.yaml, empty when the artifact has none.
        before, after: bytes of each of `PARTS`.
        warnings: one sentence each.
        record: content of run.json, empty when the artifact has none.
        architecture: class of the model.
    """

    path: Path
    manifest: dict[str, Any]
    recipe: str
    before: dict[str, int]
    after: dict[str, int]
    warnings: list[str]
    record: dict[str, Any] = field(default_factory=dict)
    architecture: str | None = None

    @property
    def texts(self) -> tuple[str, str]:
        """Descriptions of the calibration and evaluation text; empty if the manifest names none."""
        told = (self.manifest.get(name) or {} for name in ("calibration", "evaluation"))
        calibration, evaluation = (str(text.get("description") or "") for text in told)
        return calibration, evaluation

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The compressed layers in model order: name, method, format, error, bits, sparsity, bytes_before, bytes_after, notes."""
        return list(self.manifest.get("layers") or [])

    @property
    def metrics(self) -> dict[str, Any]:
        """Quality before and after; empty when the recipe asked for no evaluation."""
        return dict(self.manifest.get("metrics") or {})

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors of the source."""
        return int(self.manifest["bytes"]["before"])

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors of the artifact."""
        return int(self.manifest["bytes"]["after"])

    @property
    def layer_bits(self) -> float | None:
        """Bits a weight over all compressed layers, scales and indices included; None without layers."""
        weights = sum(layer_weights(layer) for layer in self.layers)
        return 8 * sum(layer["bytes_after"] for layer in self.layers) / weights if weights else None

    @property
    def layer_sparsity(self) -> float | None:
        """Share of zeros over all compressed layers; None without layers."""
        weights = sum(layer_weights(layer) for layer in self.layers)
        zeros = sum(layer["sparsity"] * layer_weights(layer) for layer in self.layers)
        return zeros / weights if weights else None


def layer_weights(layer: dict[str, Any]) -> int:
    """How many weights a layer of the manifest has."""
    if "shape" in layer:
        rows, columns = layer["shape"]
        return int(rows) * int(columns)
    return round(8 * layer["bytes_after"] / layer["bits"]) if layer["bits"] else 0


def gather(artifact_path: str | Path) -> Facts:
    """Read the facts of an artifact. No tensor is loaded.

    Raises:
        ArtifactError: not an artifact (a plain checkpoint has no report), or one that is damaged.
    """
    artifact = Artifact(artifact_path)
    manifest = artifact.manifest
    if manifest is None:
        raise ArtifactError(f"{artifact.path} has no compress.json to report on; give a compressed artifact")
    for key in ("before", "after"):
        if not isinstance((manifest.get("bytes") or {}).get(key), int):
            raise ArtifactError(f"{artifact.path / 'compress.json'} has no bytes.{key}, which the report needs")
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for name, account in manifest["tensors"].items():
        part = part_of(name)
        before[part] += account.get("bytes_before", 0)
        for stored in account.get("stored_as", []):
            where = PARTS[-1] if _OVERHEAD.search(stored) else part
            after[where] += artifact.checkpoint.nbytes(stored)
    recipe, record = artifact.path / "recipe.yaml", artifact.path / RECORD
    return Facts(
        path=artifact.path,
        manifest=manifest,
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        before={part: before[part] for part in PARTS},
        after={part: after[part] for part in PARTS},
        warnings=list(_warnings(manifest)),
        record=read_object(record, "remove it, and the report is written without it") if record.is_file() else {},
        architecture=next(iter(artifact.config.get("architectures") or []), None),
    )


def _warnings(manifest: dict[str, Any]) -> list[str]:
    found = [str(text) for text in manifest.get("warnings") or []]
    calibration = manifest.get("calibration") or {}
    if calibration.get("warning"):
        found.append(str(calibration["warning"]))
    found += exceeded(manifest.get("metrics") or {})
    for name, account in manifest["tensors"].items():
        reason = account.get("reason", "")
        if account["action"] == "dropped" and reason != _CUT:
            found.append(f"{name} was dropped" + (f": {reason}" if reason else ""))
        elif "NaN" in reason:
            found.append(reason)
    for layer in manifest.get("layers") or []:
        if (layer.get("notes") or {}).get("retries"):
            found.append(f"{layer['name']}: the Hessian needed more damping ({notes_text(layer['notes'])})")
    return list(dict.fromkeys(found))


def notes_text(notes: dict[str, Any]) -> str:
    """A layer's notes in one line, `damping 0.01, retries 2`: without counts that are zero, and without its share of zeros."""
    told = {key: value for key, value in notes.items() if isinstance(value, (bool, str)) or value}
    told.pop("sparsity", None)
    return ", ".join(f"{key.replace('_', ' ')} {_short(value)}" for key, value in told.items())


def _short(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def split_layer_name(name: str) -> tuple[int, str]:
    """Block index and short kind of a layer: `model.layers.3.self_attn.q_proj` is (3, "q_proj"); -1 outside of blocks."""
    match = re.search(r"\.(\d+)\.(.+)$", "." + name)
    block, kind = (-1, name) if match is None else (int(match.group(1)), match.group(2).rsplit(".", 1)[-1])
    # Names of one model differ in their ends more often than in their beginnings.
    return block, kind if len(kind) <= _LONGEST_KIND else f"{kind[:6]}…{kind[7 - _LONGEST_KIND :]}"
