"""Kangaroo: a small attention block goes on from the artifact's first layers to its head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import nn

from compress.distill.draft.checks import check_in_c, check_trained
from compress.distill.draft.config import DraftConfig, DraftMethod
from compress.distill.draft.cut import cut_checkpoint
from compress.distill.draft.directory import draft_directory
from compress.distill.draft.making import round_trained
from compress.distill.draft.nested import final_norm
from compress.distill.draft.prospect import Prospect, RefusedError
from compress.distill.draft.student import Student
from compress.distill.draft.write import SCHEMA_VERSION
from compress.distill.train.losses import Objective
from runtime.errors import RequestError
from runtime.modeling.skeleton import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.distill.draft.making import Making

ADAPTER = "adapter.safetensors"
_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


class KangarooConfig(DraftConfig):
    """The artifact's own first layers draft, and between them and its head a block of attention (by default with no feed-forward half) and
    a norm, which alone are trained. They read what the artifact computes anyway, so the draft costs little memory.
    """

    method: Literal["kangaroo"] = Field("kangaroo", description="Name of the method.")
    exit_layer: int = Field(2, ge=1, description="Layers of the artifact before the adapter.")
    feed_forward: bool = Field(False, description="Give the adapter a feed-forward half too.")
    quantize: Literal["none"] = Field("none", description="Adapters are stored as they are, in bfloat16.")


class NoFeedForward(nn.Module):
    """In the place of a feed-forward half: adds nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


class KangarooStudent(Student):
    """The first layers of a target, frozen, an adapter above them, and the target's frozen head.

    Liu et al., Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting, arXiv 2404.18911. The adapter begins as the target's
    next layer, which reads what it will read.

    Args:
        draft: the target's first layers and the one that becomes the adapter (`cut`), float32. It is changed: all but the adapter is
            frozen.
        objective: None: the default, forward KL to the target's distribution.
        feed_forward: the adapter has a feed-forward half.

    Attributes:
        exit_layer: how many layers come before the adapter.

    Raises:
        RequestError: a model of another structure, or of one layer.
    """

    def __init__(self, draft: PreTrainedModel, objective: Objective | None = None, feed_forward: bool = False) -> None:
        super().__init__(draft, objective)
        blocks = find_blocks(draft)[1]
        self.exit_layer, self.feed_forward = len(blocks) - 1, feed_forward
        self._block: Any = blocks[-1]
        missing = [part for part in _PARTS if not hasattr(self._block, part)]
        if missing:
            raise RequestError(f"a {type(draft).__name__} has no adapter: its layers have no {missing[0]}")
        if not self.exit_layer:
            raise RequestError("an adapter needs at least one layer before it")
        draft.requires_grad_(False)
        trained = [self._block.self_attn, self._block.input_layernorm, final_norm(draft)]
        if feed_forward:
            trained += [self._block.mlp, self._block.post_attention_layernorm]
        else:
            self._block.mlp = NoFeedForward()
        for module in trained:
            module.requires_grad_(True)

    def adapter(self) -> dict[str, torch.Tensor]:
        """Its tensors, as `runtime.engines.native.sublayers.Adapter` names them."""
        tensors = {name: value for name, value in self._block.named_parameters() if value.requires_grad}
        norm: Any = final_norm(self.draft)
        return {name: value.detach() for name, value in {**tensors, "norm.weight": norm.weight}.items()}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "exit_layer": self.exit_layer, "feed_forward": self.feed_forward}


def write_adapter(
    directory: str | Path,
    student: KangarooStudent,
    facts: Mapping[str, Any],
    *,
    target: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write what was trained; the directory is there whole or not at all. See `runtime.drafting.drafters.kangaroo.build`.

    Args:
        directory: new, or an earlier draft's, which is replaced.
        facts: JSON-able, for draft.json.
        target: fingerprint of the checkpoint that it is for.
        dtype: of the stored weights.

    Raises:
        RequestError: the directory holds something else.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    tensors = {name: value.to("cpu", dtype).contiguous() for name, value in student.adapter().items()}
    content = {
        "schema_version": SCHEMA_VERSION, "method": "kangaroo", "target": target, "vocabulary": student.vocabulary,
        "exit_layer": student.exit_layer, "facts": dict(facts),
    }  # fmt: skip
    with draft_directory(directory, content) as temporary:
        save_file(tensors, temporary / ADAPTER)
    return directory


def make(making: Making, config: KangarooConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    from compress.distill.draft.making import read_bytes
    from compress.distill.draft.write import note_facts

    given, held_out = making.split()
    draft = cut_checkpoint(making.artifact, config.exit_layer + 1)
    student = KangarooStudent(draft, config.objective(), config.feed_forward)
    making.facts["exit_layer"] = config.exit_layer
    before = making.measure(config, student, held_out)
    making.train(config, student, making.source(config, student, given), held_out)
    round_trained(student)
    making.facts |= {"before": before, "after": making.measure(config, student, held_out)}
    write_adapter(making.output, student, making.facts, target=making.fingerprint)
    whole = read_bytes(making.artifact, Student(student.draft))
    own = sum(2 * value.numel() for value in student.adapter().values())
    read = whole - _later_bytes(making.artifact, find_blocks(student.draft)[0], config.exit_layer) + own
    making.note_cost(student, read, whole)
    note_facts(making.output, making.facts)
    return {"model": making.output.name}


def _later_bytes(artifact: Path, blocks: str, first: int) -> int:
    """Bytes of the layers from `first` on, which a draft does not read."""
    from runtime.checkpoint.checkpoint import Checkpoint

    checkpoint = Checkpoint(artifact)
    total = 0
    for name in checkpoint.names():
        if name.startswith(f"{blocks}.") and int(name[len(blocks) + 1 :].partition(".")[0]) >= first:
            total += checkpoint.nbytes(name)
    return total


def check(config: KangarooConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    check_trained(config, target)
    check_in_c(target, 2)
    if config.exit_layer >= target.depth:
        text = f"the model has {target.depth} layers; the draft must leave it before the last, not after {config.exit_layer}"
        raise RefusedError("exit_layer", text)


METHOD = DraftMethod(
    name="kangaroo",
    config=KangarooConfig,
    summary="the artifact's first layers draft, with a small trained block between them and its head",
    paper="Liu et al., Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting, 2024, arXiv 2404.18911",
    make=make,
    check=check,
)
