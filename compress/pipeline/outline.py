"""A checkpoint of zeros that looks as a stage's result will: what comes next is checked against it, and a model is built from it before its
tensors are written."""

from __future__ import annotations

from pathlib import Path

import torch

from compress.pipeline.plain import config_dict, placeholder
from compress.pipeline.stream import StreamedModel
from compress.pipeline.structure_job import StructureJob
from compress.prune.structure.couplings import shapes
from runtime.checkpoint import Checkpoint
from runtime.skeleton import build_skeleton


def outline(directory: Path, streamed: StreamedModel, job: StructureJob) -> Checkpoint:
    """Write one, which takes no room on the disk.

    Args:
        streamed: the model that the job will make smaller.
    """
    source = streamed.checkpoint
    model = build_skeleton(job.config, torch.float32, stored=source.names())
    tensors = {name: (shape, source.dtype(name)) for name, shape in shapes(model).items() if source.has(name)}
    placeholder(directory, source.path, config_dict(source, streamed.config, job.config), tensors)
    if job.tokens is not None:
        job.tokens.write(directory)
    return Checkpoint(directory)
