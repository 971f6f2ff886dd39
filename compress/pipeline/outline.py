"""A checkpoint of zeros that looks as a stage's result will: what comes next is checked against it, and a model is built from it before its
tensors are written."""

from __future__ import annotations

from pathlib import Path

from compress.pipeline.plain import zeros
from compress.pipeline.stream import StreamedModel
from compress.pipeline.structure_job import StructureJob
from runtime.checkpoint import Checkpoint


def outline(directory: Path, streamed: StreamedModel, job: StructureJob) -> Checkpoint:
    """What a job will make of the whole model, with a tokenizer that goes with it."""
    zeros(directory, streamed, job.config)
    if job.tokens is not None:
        job.tokens.write(directory)
    return Checkpoint(directory)
