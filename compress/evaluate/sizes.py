"""Size of a model: on disk, in memory, and in bits a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from runtime.api.model import Model
    from runtime.checkpoint.artifact import Artifact
    from runtime.checkpoint.export_directory import Export


def parameter_count(artifact: Artifact | Export, trust_remote_code: bool = False) -> int:
    """Weights of the model that `config.json` describes, uncompressed; tied ones counted once. Nothing is allocated."""
    from runtime.modeling.skeleton import build_skeleton, read_config

    skeleton = build_skeleton(read_config(artifact.path, trust_remote_code), torch.bfloat16, trust_remote_code)
    return sum(parameter.numel() for parameter in skeleton.parameters())


def sizes(model: Model, trust_remote_code: bool = False) -> dict[str, Any]:
    """`bytes` (all tensors on disk; of an export, its files), `bits_per_weight` (these over all weights), `weight_bytes` in memory."""
    from runtime.checkpoint.artifact import Artifact

    directory = model.artifact
    total = directory.checkpoint.total_bytes if isinstance(directory, Artifact) else model.engine.weight_bytes
    return {
        "bytes": total,
        "bits_per_weight": 8 * total / parameter_count(model.artifact, trust_remote_code),
        "weight_bytes": model.engine.weight_bytes,
    }
