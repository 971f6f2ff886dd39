"""Training of one draft: the finished artifact as the teacher, rows of text, the training, storing and measuring."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.core.files import intact, seal, write_json, written_beside
from compress.distill.draft import vocab_trim
from compress.distill.draft.acceptance import Texts, measure_acceptance, target_texts
from compress.distill.draft.checks import Prospect
from compress.distill.draft.config import CutConfig, DraftConfig
from compress.distill.draft.cut import chosen_layers, cut_checkpoint
from compress.distill.draft.speedup import worth
from compress.distill.draft.student import Student, read_bytes
from compress.distill.draft.write import KEPT, file_sums, note
from compress.distill.train.data import MixedRows, OnPolicyRows, Source, TextRows, digest_of, split_rows
from compress.distill.train.loop import Trained, Training
from compress.distill.train.options import TrainOptions
from compress.distill.train.teacher import Teacher, teacher_rows
from compress.distill.train.teacher_cache import TeacherCache, cache_teacher
from compress.model.stage import Apply, Store
from runtime.checkpoint.checkpoint import Checkpoint, read_json
from runtime.drafting.drafters.draft_model import DRAFT
from runtime.modeling.skeleton import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.core.progress import Reporter

_GROUP = 128  # of the schemes
_NOT_OF_A_DRAFT = ("README.md", "report.html", "compress.log", "run.json", "recipe.yaml", "compress.json")
_AFTERWARDS = {"quantize", "accept_head"}  # fields of a draft section that matter only when training is over


@dataclass(frozen=True)
class DraftMethod:
    """One method of `compress.distill.draft.METHODS`.

    Attributes:
        name, config, summary, paper: as of `compress.core.method.Method`.
        make: trains the draft and writes it; returns what `drafter=` of `runtime.load` takes for it, "model" being its directory.
        check: raises `compress.distill.draft.checks.RefusedError` where a draft with these fields cannot be made for a target; those that
            all trained drafts have are checked before (`check_trained`).
        trains: a training is part of it, which several processes can share.
    """

    name: str
    config: type[DraftConfig]
    summary: str
    paper: str
    make: Callable[[DraftTraining, Any], dict[str, Any]]
    check: Callable[[Any, Prospect], None]
    trains: bool = True
    needs: frozenset[str] = frozenset()


@dataclass
class DraftTraining:
    """Training of one draft.

    Attributes:
        artifact: directory of the target, finished but for its manifest.
        teacher: the same, loaded.
        rows: int64 `[n, s]`, calibration text.
        kinds: {"text", "code", "chat": int64 `[m, s]`}, samples on which acceptance is reported.
        store: its `output` is the draft's directory, to be written; its `apply` stores drafts in few bits.
        reporter: is told.
        start: a checkpoint that becomes the draft; None: the draft is cut out of the artifact.
        facts: for the manifest and the report, filled on the way.
        texts: what the target has written to be measured on, by the rows that it continued.
    """

    artifact: Path
    teacher: Teacher
    rows: torch.Tensor
    kinds: Mapping[str, torch.Tensor]
    store: Store
    reporter: Reporter
    start: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, Texts] = field(default_factory=dict)

    def run(self, config: DraftConfig, student: Student) -> dict[str, Any]:
        """Train a draft, store it, and measure what is stored; see `DraftMethod.make`."""
        given, held_out = self.split()
        student.to(self.teacher.device)
        self._measured("before", config, student, held_out)
        self.train(config, student, self.source(config, student, given), held_out)
        self.write(config, student, held_out)
        self._measured("after", config, student, held_out)
        self.settle(student)
        return {"model": self.store.output.name}

    # ---------------------------------------------------------------- rows
    def split(self) -> tuple[torch.Tensor, TextRows]:
        """Rows to train on, and rows that are held out."""
        given, apart = split_rows(self.rows)
        return given, TextRows(apart)

    def source(self, config: DraftConfig, student: Student, given: torch.Tensor) -> Source:
        """What the student is trained on; what the teacher writes for it is kept in `work`."""
        if config.data == "given":
            return TextRows(given)
        prompt = max(1, given.shape[1] // 4)
        tokens = int(given.shape[1]) - prompt
        prompts = given[:, :prompt].repeat(config.continuations, 1)
        own = OnPolicyRows(student.draft, prompts, tokens, 1.0, self.teacher.ends, student.kept)
        if config.data == "on_policy":
            return own
        fixed = self.written(config, prompts, tokens)
        return fixed if config.data == "teacher" else MixedRows(fixed, own)

    def written(self, config: DraftConfig, prompts: torch.Tensor, tokens: int) -> TextRows:
        """What the teacher writes after prompts, once."""
        decided_by = [self.teacher.fingerprint, prompts, tokens, config.seed]
        file = part(self.store.work, "teacher_rows", decided_by, ".safetensors")
        with self.store.team.in_turn():
            if intact(file):
                return TextRows.load(file)
            self.reporter.phase("teacher writes", -(-len(prompts) // 16))
            rows = teacher_rows(
                self.teacher, prompts, tokens, seed=config.seed,
                told=lambda done, every: self.reporter.step(f"{done} of {every} rows"),
            )  # fmt: skip
            rows.save(file)
            seal(file)
            return rows

    # ---------------------------------------------------------------- models
    def cut(self, config: CutConfig) -> PreTrainedModel:
        """What the draft is at first, float32: the checkpoint that is given, or some layers of the artifact between embeddings and head."""
        if self.start is not None:
            self.facts["model"] = {"name": config.model, "fingerprint": Checkpoint(self.start).fingerprint()}
            return cut_checkpoint(self.start, None)
        assert config.layers is not None
        target = read_config(self.artifact)
        layers = chosen_layers(target, target.num_hidden_layers, config.layers)
        self.facts["layers"] = layers
        return cut_checkpoint(self.artifact, layers)

    def kept(self, most: int | None) -> torch.Tensor | None:
        """The `most` tokens that a draft with a trimmed vocabulary keeps; None: all."""
        if most is None:
            return None
        counted = vocab_trim.expected_counts(self.teacher, TextRows(self.split()[0]))
        kept = self.store.team.broadcast(vocab_trim.choose(counted, most, self.teacher.ends))
        self.facts["vocabulary"] = {
            "tokens": len(kept), "of": self.teacher.vocabulary, "coverage": vocab_trim.coverage(counted, kept),
        }  # fmt: skip
        return kept

    # ---------------------------------------------------------------- training
    def train(self, config: DraftConfig, student: Student, source: Source, held_out: TextRows) -> Trained:
        """Train, or go on where an interrupted run stopped; how it went is in the facts."""
        team = self.store.team
        teacher: Teacher | TeacherCache | None = self.teacher if student.objective.needs_teacher else None
        if config.teacher_top is not None and teacher is not None:
            assert isinstance(source, TextRows)  # `check_trained`
            teacher = self.cached(config.teacher_top, config, student, source)
        with team.in_turn():
            directory = self._checkpoints(config)
        trained = Training(
            student, source, teacher, held_out, self.teacher, TrainOptions.of(config), directory, team.accelerator, self.teacher.device,
            self.reporter,
        ).run()  # fmt: skip
        team.leave()
        # What it was worth before and is worth after is measured on what is stored; the curve alone is of the weights in training.
        self.facts["training"] = {key: v for key, v in trained.facts().items() if key not in ("before", "after")}
        return trained

    def _checkpoints(self, config: DraftConfig) -> Path:
        """The directory of a training's checkpoints. Those of other settings are removed: they are several times as large as the draft."""
        fields = config.model_dump(mode="json", exclude=_AFTERWARDS)
        decided_by = [fields, self.teacher.fingerprint, self.rows, self.facts.get("model")]
        own = part(self.store.work, "training", decided_by)
        for other in self.store.work.glob("training-*"):
            if other != own:
                shutil.rmtree(other, ignore_errors=True)
        return own

    def cached(self, top: int, config: DraftConfig, student: Student, rows: TextRows) -> TeacherCache:
        """The teacher's likeliest tokens at the rows, computed once."""
        kept = None if student.kept is None else student.kept.cpu()
        decided_by = [self.teacher.fingerprint, rows.ids, top, config.temperature, kept]
        place = part(self.store.work, "teacher", decided_by)
        with self.store.team.in_turn():
            self.reporter.phase("teacher", -(-len(rows) // 8))
            return cache_teacher(
                self.teacher, rows, place, k=min(top, student.width), temperature=config.temperature, kept=kept,
                told=lambda done, every: self.reporter.step(f"{done} of {every} rows"),
            )  # fmt: skip

    # ---------------------------------------------------------------- what it is worth
    def measure(self, config: DraftConfig, student: Student, held_out: TextRows) -> dict[str, Any]:
        """Acceptance on held-out rows and on each kind of sample, of a student that is where the teacher is."""
        found = {}
        for kind, rows in {"held_out": held_out, **{kind: TextRows(ids) for kind, ids in self.kinds.items()}}.items():
            name = digest_of(rows.ids)
            if name not in self.texts:
                self.texts[name] = target_texts(self.teacher, rows)
            # At most half of what is continued, so that there are steps to count.
            length = min(config.tokens, max(1, rows.length // 4))
            found[kind] = measure_acceptance(student, self.teacher, rows, self.texts[name], length)
        return found

    def _measured(self, when: str, config: DraftConfig, student: Student, held_out: TextRows) -> None:
        """`measure` into the facts; of a student with variants each by itself."""
        for name, variant in student.variants().items():
            found = self.measure(config, variant, held_out)
            self.facts.setdefault("by_depth", {}).setdefault(name, {})[when] = self.facts[when] = found
        if when not in self.facts:
            self.facts[when] = self.measure(config, student, held_out)

    # ---------------------------------------------------------------- writing
    def write(self, config: DraftConfig, student: Student, held_out: TextRows) -> None:
        """The draft's directory, its weights stored as the config says; the student then has the numbers that are stored."""
        plain, output = config.quantize == "none", self.store.output
        where = output if plain else self.store.work / "dense"
        content = {"method": config.method, "target": self.teacher.fingerprint, "facts": dict(self.facts)}
        student.write(where, content, self.teacher, held_out)
        if not plain:
            compact(where, output, config.quantize, student.kept is not None, self.store.apply)
            shutil.rmtree(where)
        student.read_back(output)

    def settle(self, student: Student) -> None:
        """What the written draft costs, and what it promised before training and promises now, into the facts and its directory."""
        read = student.bytes_read(self.store.output, self.artifact)
        cost = read / read_bytes(self.artifact)
        self.facts["cost"] = {
            "bytes": round(read), "of_target": cost, "tokens": student.levels if student.one_pass else 1,
        }  # fmt: skip
        self.facts["worth"] = {
            when: worth(self.facts[when], cost, one_pass=student.one_pass) for when in ("before", "after")
        }
        note(self.store.output, facts=self.facts)


def compact(source: Path, output: Path, scheme: str, trimmed: bool, apply: Apply) -> None:
    """Quantize a draft's directory, round to nearest.

    Args:
        source: of `write_draft`.
        output: new, or an earlier draft's.
        scheme: "W8A16" or "W4A16".
        trimmed: its head is cut down to the kept tokens when it is loaded, and stays as it is here.
        apply: runs a recipe.
    """
    config = read_json(source / "config.json")
    widths = ("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim")
    narrow = min((value for key in widths if (value := config.get(key))), default=0)
    quantize: dict[str, Any] = {"method": "rtn", "scheme": scheme, "ignore": ["lm_head"] if trimmed else []}
    if narrow < _GROUP:
        quantize["group_size"] = "channel"
    shutil.rmtree(output, ignore_errors=True)
    apply({"name": "draft", "model": str(source.resolve()), "stages": [{"quantize": quantize}]}, output)
    for name in _NOT_OF_A_DRAFT:
        (output / name).unlink(missing_ok=True)
    if trimmed:
        with written_beside(output / KEPT) as temporary:
            shutil.copyfile(source / KEPT, temporary)
    write_json(output / DRAFT, {**read_json(source / DRAFT), "quantized": scheme, "files": file_sums(output)})


def part(work: Path, name: str, decided_by: Sequence[Any], suffix: str = "") -> Path:
    """The place of a part; the directory that it lies in is there.

    Args:
        work: for all parts.
        decided_by: tensors, and plain data.
    """
    plain = [digest_of(value) if isinstance(value, torch.Tensor) else value for value in decided_by]
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    work.mkdir(parents=True, exist_ok=True)
    return work / f"{name}-{digest}{suffix}"
