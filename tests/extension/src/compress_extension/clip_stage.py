"""Stage `clip`: outliers of every matrix in the blocks are clipped before anything is compressed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from compress.core.memory_bounds import Bounds
from compress.core.method import Method
from compress.core.progress import Reporter
from compress.model.checkpoint_writer import PlainWriter
from compress.model.context import Context
from compress.model.footprint import Footprint, ModelSize, Rows, Speed
from compress.model.stage import Job, StageRoom, Store
from compress.recipe import Stage
from compress.report.elements import section, table
from runtime.errors import RequestError


class ClipConfig(BaseModel):
    """Clip weights that are far from the mean of their matrix, in standard deviations."""

    model_config = ConfigDict(extra="forbid", strict=True)
    method: Literal["deviations"] = Field("deviations", description="How outliers are told.")
    deviations: float = Field(3.0, gt=0, description="Largest distance from the mean, in standard deviations.")


METHOD = Method("deviations", ClipConfig, "clip at so many standard deviations", "Winsorizing (Hastings et al., 1947)")


@dataclass(frozen=True)
class CheckedClip(Job):
    """A clip stage that has been checked; `size`: the model in numbers."""

    size: ModelSize

    @property
    def stored(self) -> int:
        return self.size.stored

    def footprint(self, context: Context, rows: Rows, bounds: Bounds, speed: Speed) -> Footprint:
        largest = max(self.size.block, self.size.outside)
        return Footprint(memory=(self.size.itemsize + 4) * largest, seconds=2.0 * self.size.total / speed.single)

    def describe(self) -> str:
        return f"weights clipped at {self.stage.config.deviations:g} standard deviations"

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        streamed, source = context.streamed, context.checkpoint
        count = len(streamed.blocks)
        writer = PlainWriter(store.output, count + 1, streamed.model)
        reporter.phase(self.describe(), count + 1, writer.done())
        for part in range(writer.done(), count + 1):
            names = streamed.block_names(part) if part < count else streamed.outside_names()
            tensors, clipped = {name: source.get(name) for name in names}, 0
            for name, value in tensors.items():
                if part < count and value.ndim == 2:
                    tensors[name] = self._clip(value)
                    clipped += int((tensors[name] != value).sum())
            writer.write(part, tensors, {"clipped": clipped})
            reporter.step(f"part {part}: {clipped} weights clipped")
        total = sum(writer.facts(part)["clipped"] for part in range(count + 1))
        writer.finish(context.path, source.config)
        return {"clipped": total, "weights": self.size.inside}

    def _clip(self, value: torch.Tensor) -> torch.Tensor:
        mean, far = value.float().mean(), self.stage.config.deviations * value.float().std()
        return value.float().clamp(mean - far, mean + far).to(value.dtype)


class Clip(StageRoom):
    """The stage `clip`."""

    name = "clip"
    summary = "clip outliers of the weights"

    def methods(self) -> Mapping[str, Any]:
        return {METHOD.name: METHOD}

    def check(self, context: Context, stage: Stage) -> Job:
        if context.streamed.kind != "decoder":
            raise RequestError(context.recipe.origin.at(stage.path, "only decoders are clipped"))
        return CheckedClip(stage, ModelSize.of(context.streamed))

    def row(self, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
        return f"weights clipped by {record['clip']}", "", "", f"{record['clipped']:,} of {record['weights']:,}"

    def report(self, manifest: Mapping[str, Any]) -> str:
        records = [record for record in manifest.get("passes") or [] if self.name in record]
        return section("Clipping", table(("", "", "", "clipped"), map(self.row, records))) if records else ""


STAGE = Clip()
