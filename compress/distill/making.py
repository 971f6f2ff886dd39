"""What making a draft works with: the finished artifact as the teacher, rows of text, places for what is unfinished and for the result."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.distill import vocab_trim
from compress.distill.accept_head import save_accept_head
from compress.distill.acceptance import measure_acceptance
from compress.distill.config import CutConfig, DraftConfig
from compress.distill.cut import cut_checkpoint, spread
from compress.distill.data import MixedRows, OnPolicyRows, Source, TextRows, teacher_rows
from compress.distill.speedup import best_length
from compress.distill.student import Student
from compress.distill.teacher import Teacher
from compress.distill.teacher_cache import TeacherCache, cache_teacher
from compress.distill.train import Trained, train
from compress.distill.write import note_facts, write_draft
from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.pipeline.progress import Reporter

HELD_OUT, MOST_HELD_OUT = 8, 64  # an eighth of the rows, and at most so many


@dataclass
class Making:
    """One draft in the making.

    Attributes:
        artifact: directory of the target, finished but for its manifest.
        fingerprint: of its weights.
        teacher: the same, loaded.
        rows: int64 `[n, s]`, calibration text.
        kinds: {"text", "code", "chat": int64 `[m, s]`}, samples on which acceptance is reported; empty where there is no tokenizer.
        work: for what an interrupted run goes on from.
        output: the draft's directory, to be written.
        reporter: is told.
        facts: for the manifest and the report, filled on the way.
    """

    artifact: Path
    fingerprint: str
    teacher: Teacher
    rows: torch.Tensor
    kinds: Mapping[str, torch.Tensor]
    work: Path
    output: Path
    reporter: Reporter
    facts: dict[str, Any] = field(default_factory=dict)

    # ---------------------------------------------------------------- rows
    def split(self) -> tuple[torch.Tensor, TextRows]:
        """Rows to train on, and rows that are held out."""
        count = min(MOST_HELD_OUT, max(1, len(self.rows) // HELD_OUT))
        return self.rows[:-count], TextRows(self.rows[-count:])

    def source(self, config: DraftConfig, student: Student, given: torch.Tensor) -> Source:
        """What the student is trained on; what the teacher writes for it is kept in `work`."""
        if config.data == "given":
            return TextRows(given)
        prompt = max(1, given.shape[1] // 4)
        tokens = int(given.shape[1]) - prompt
        if not self.teacher.writes:
            raise RequestError(f"data {config.data}: this teacher gives logits and writes no texts; use given")
        prompts = given[:, :prompt].repeat(config.continuations, 1)
        own = OnPolicyRows(student.draft, prompts, tokens, 1.0, self.teacher.ends, student.kept)
        if config.data == "on_policy":
            return own
        fixed = self.written(config, prompts, tokens)
        return fixed if config.data == "teacher" else MixedRows(fixed, own)

    def written(self, config: DraftConfig, prompts: torch.Tensor, tokens: int) -> TextRows:
        """What the teacher writes after prompts, once."""
        file = self.work / "teacher_rows.safetensors"
        if file.is_file():
            return TextRows.load(file)
        self.reporter.phase("teacher writes", -(-len(prompts) // 16))
        rows = teacher_rows(
            self.teacher, prompts, tokens, seed=config.seed,
            told=lambda done, every: self.reporter.step(f"{done} of {every} rows"),
        )  # fmt: skip
        self.work.mkdir(parents=True, exist_ok=True)
        rows.save(file)
        return rows

    # ---------------------------------------------------------------- models
    def cut(self, config: CutConfig) -> PreTrainedModel:
        """Some layers of the artifact under its embeddings and head, float32."""
        layers: int | Sequence[int] = config.layers
        if isinstance(layers, int):
            from runtime.checkpoint import read_json

            depth = int(read_json(self.artifact / "config.json").get("num_hidden_layers") or 0)
            layers = spread(depth, layers)
        self.facts["layers"] = list(layers)
        return cut_checkpoint(self.artifact, layers)

    def kept(self, config: CutConfig, given: torch.Tensor) -> torch.Tensor | None:
        """The tokens that a trimmed draft keeps."""
        if config.vocabulary is None:
            return None
        counted = vocab_trim.expected_counts(self.teacher, TextRows(given))
        kept = vocab_trim.choose(counted, config.vocabulary, self.teacher.ends)
        self.facts["vocabulary"] = {
            "tokens": len(kept), "of": self.teacher.vocabulary, "coverage": vocab_trim.coverage(counted, kept),
        }  # fmt: skip
        return kept

    # ---------------------------------------------------------------- training
    def train(self, config: DraftConfig, student: Student, source: Source, held_out: TextRows) -> Trained:
        """Train, or go on where an interrupted run stopped; how it went is in the facts."""
        teacher: Teacher | TeacherCache | None = self.teacher if student.objective.needs_teacher else None
        if config.teacher_top is not None and teacher is not None:
            if not isinstance(source, TextRows):
                raise RequestError(
                    f"teacher_top keeps what the teacher says of fixed rows, and data {config.data} is written anew; use given or teacher"
                )
            self.reporter.phase("teacher", -(-len(source) // 8))
            teacher = cache_teacher(
                self.teacher, source, self.work / "teacher", k=min(config.teacher_top, student.width),
                temperature=config.temperature, kept=student.kept, told=lambda done, every: self.reporter.step(f"{done} of {every} rows"),
            )  # fmt: skip
        trained = train(
            student, source, teacher, held_out, self.teacher, config.options(),
            directory=self.work / "training", resume=True, progress=self.reporter,
        )  # fmt: skip
        facts = trained.facts()
        del facts["seconds"]  # the same recipe gives the same bytes
        self.facts["training"] = facts
        return trained

    # ---------------------------------------------------------------- what it is worth
    def measure(self, config: DraftConfig, student: Student, held_out: TextRows) -> dict[str, Any]:
        """Acceptance on held-out rows and on each kind of sample."""
        length = min(config.tokens, held_out.length // 4)
        found = {"held_out": measure_acceptance(student, self.teacher, held_out, length=length)}
        for kind, rows in self.kinds.items():
            found[kind] = measure_acceptance(student, self.teacher, TextRows(rows), length=length)
        return found

    def worth(self, measured: Mapping[str, Any], cost: float) -> dict[str, Any]:
        """{kind: {"greedy", "sampling": the best draft length and the speedup that it promises}} for a target bound by memory.

        Args:
            cost: bytes that are read for a drafted token, as a share of those of the target's step.
        """
        result: dict[str, Any] = {}
        for kind, value in measured.items():
            runs = value["continuations"] or value["text"]
            result[kind] = {}
            for way, run in runs.items():
                rates = [rate for rate in run["by_position"] if rate is not None]
                length, speedup = best_length(rates, cost)
                result[kind][way] = {"length": length, "speedup": speedup}
        return result

    # ---------------------------------------------------------------- writing
    def settle(
        self, config: DraftConfig, student: Student, head: dict[str, torch.Tensor] | None = None, **more: Any
    ) -> None:
        """Write the draft, with the head that foresees acceptance if it has one, and what it costs and promises into the facts.

        Args:
            more: as of `write_draft`.
        """
        self.write(config, student, **more)
        if head is not None:
            save_accept_head(self.output, head)
        read = read_bytes(self.output, student)
        passes = 1.0 / student.levels  # of a draft that proposes several tokens at once
        cost = passes * read / read_bytes(self.artifact, Student(student.draft))
        self.facts["cost"] = {"bytes": read, "of_target": cost}
        self.facts["worth"] = self.worth(self.facts["after"], cost)
        note_facts(self.output, self.facts, **({} if head is None else {"accept_head": True}))

    def write(self, config: DraftConfig, student: Student, **more: Any) -> None:
        """The draft's directory, its weights stored as the config says."""
        draft: Any = student.draft
        plain = config.quantize == "none"
        where = self.output if plain else self.work / "dense"
        kept = None if student.kept is None else student.kept.cpu()
        write_draft(where, draft, self.facts, method=config.method, target=self.fingerprint, kept=kept, **more)
        if not plain:
            from compress.distill.compact import compact

            compact(where, self.output, config.quantize, trimmed=student.kept is not None)
            shutil.rmtree(where)


def read_bytes(directory: Path, student: Student) -> int:
    """Bytes of weights that one token of a draft reads: all but the embeddings, and of a trimmed head its part."""
    from runtime.checkpoint import Checkpoint

    checkpoint = Checkpoint(directory)
    names = checkpoint.names()
    tied = not any(name.startswith("lm_head.") for name in names)
    total = 0.0
    for name in names:
        size = checkpoint.nbytes(name)
        if "embed_tokens" in name or name.startswith(("transformer.wte", "gpt_neox.embed_in")):
            total += size * student.width / student.vocabulary if tied else 0
        elif name.startswith("lm_head."):
            total += size * student.width / student.vocabulary
        else:
            total += size
    return round(total)
