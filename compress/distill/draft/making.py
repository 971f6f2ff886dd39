"""What making a draft works with: the finished artifact as the teacher, rows of text, places for what is unfinished and for the result."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.core.files import intact, seal, sha256, write_json, written_beside
from compress.core.processes import Team
from compress.distill.draft import vocab_trim
from compress.distill.draft.acceptance import Texts, measure_acceptance, target_texts
from compress.distill.draft.config import CutConfig, DraftConfig
from compress.distill.draft.cut import chosen_layers, cut_checkpoint
from compress.distill.draft.speedup import worth
from compress.distill.draft.student import Student
from compress.distill.draft.write import KEPT, note_facts, write_draft
from compress.distill.train.checkpoint import trained_weights
from compress.distill.train.data import MixedRows, OnPolicyRows, Source, TextRows, digest_of, teacher_rows
from compress.distill.train.teacher import Teacher
from compress.distill.train.teacher_cache import TeacherCache, cache_teacher
from compress.distill.train.train import Trained, train
from runtime.checkpoint.checkpoint import read_json
from runtime.drafting.drafters.draft_model import DRAFT
from runtime.errors import RequestError
from runtime.modeling.skeleton import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.core.progress import Reporter


# Store a trained draft in few bits: it is read for every token that it proposes.

_GROUP = 128  # of the schemes
_NOT_OF_A_DRAFT = ("report.html", "compress.log", "recipe.yaml")


def compact(source: Path, output: Path, scheme: str, trimmed: bool) -> None:
    """Quantize a draft's directory, round to nearest.

    Args:
        source: of `write_draft`.
        output: new, or an earlier draft's.
        scheme: "W8A16" or "W4A16".
        trimmed: its head is cut down to the kept tokens when it is loaded, and stays as it is here.
    """
    from compress.recipe import load
    from compress.run.run import apply

    config = read_json(source / "config.json")
    widths = ("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim")
    narrow = min((value for key in widths if (value := config.get(key))), default=0)
    quantize: dict[str, Any] = {"method": "rtn", "scheme": scheme, "ignore": ["lm_head"] if trimmed else []}
    if narrow < _GROUP:
        quantize["group_size"] = "channel"
    recipe = load({"name": "draft", "model": str(source.resolve()), "stages": [{"quantize": quantize}]})
    shutil.rmtree(output, ignore_errors=True)
    apply(recipe, output=output, device="cpu", quiet=True)
    for name in _NOT_OF_A_DRAFT:
        (output / name).unlink(missing_ok=True)
    if trimmed:
        with written_beside(output / KEPT) as temporary:
            shutil.copyfile(source / KEPT, temporary)
    facts = read_json(source / DRAFT)
    files = sorted(file for file in output.iterdir() if file.is_file() and file.name != "compress.json")
    facts["files"] = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}
    facts["quantized"] = scheme
    (output / "compress.json").unlink(missing_ok=True)
    write_json(output / DRAFT, facts)


# A trained draft as it is stored: in fewer bits than it was trained in, which is what its acceptance has to be measured on.


def read_back(student: Student, directory: Path) -> None:
    """Put the draft of a directory (`write_draft`, `compact`), dequantized to float32, in the place of the one that was trained."""
    # The model, not its numbers alone: a quantized head is no longer the embeddings that it was tied to.
    student.draft = cut_checkpoint(directory, None, device=student.draft.device)


@torch.no_grad()
def round_trained(student: Student, dtype: torch.dtype = torch.bfloat16) -> None:
    """Round what was trained as `write_heads` and `write_adapter` store it."""
    for weight in trained_weights(student).values():
        weight.copy_(weight.to(dtype))


# Names of what a draft in the making leaves on the disk: each part is named after all that decides it.
#
# So a run that is continued finds what it needs and nothing else, also after the recipe's draft section was corrected: what the teacher
# wrote is used again where it still is what is asked for, and a training with other settings begins anew.

#: Fields of a draft section that matter only when training is over.
_AFTERWARDS = {"quantize", "accept_head"}


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


def training(work: Path, config: DraftConfig, decided_by: Sequence[Any]) -> Path:
    """The directory of a training's checkpoints. Those of other settings are removed: they are several times as large as the draft."""
    fields = config.model_dump(mode="json", exclude=_AFTERWARDS)
    own = part(work, "training", [fields, *decided_by])
    for other in work.glob("training-*"):
        if other != own:
            shutil.rmtree(other, ignore_errors=True)
    return own


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
        start: a checkpoint that becomes the draft; None: the draft is cut out of the artifact.
        team: the processes that train.
        facts: for the manifest and the report, filled on the way.
        texts: what the target has written to be measured on, by the rows that it continued.
    """

    artifact: Path
    fingerprint: str
    teacher: Teacher
    rows: torch.Tensor
    kinds: Mapping[str, torch.Tensor]
    work: Path
    output: Path
    reporter: Reporter
    start: Path | None = None
    team: Team = field(default_factory=Team)
    facts: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, Texts] = field(default_factory=dict)

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
        decided_by = [self.fingerprint, prompts, tokens, config.seed]
        file = part(self.work, "teacher_rows", decided_by, ".safetensors")
        with self.team.in_turn():
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
            from runtime.checkpoint.checkpoint import Checkpoint

            self.facts["model"] = {"name": config.model, "fingerprint": Checkpoint(self.start).fingerprint()}
            return cut_checkpoint(self.start, None)
        layers: int | Sequence[int] | None = config.layers
        assert layers is not None
        if isinstance(layers, int):
            target = read_config(self.artifact)
            layers = chosen_layers(target, target.num_hidden_layers, layers)
        self.facts["layers"] = list(layers)
        return cut_checkpoint(self.artifact, layers)

    def kept(self, most: int | None, given: torch.Tensor) -> torch.Tensor | None:
        """The `most` tokens that a draft with a trimmed vocabulary keeps; None: all."""
        if most is None:
            return None
        counted = vocab_trim.expected_counts(self.teacher, TextRows(given))
        kept = self.team.agreed(vocab_trim.choose(counted, most, self.teacher.ends))
        self.facts["vocabulary"] = {
            "tokens": len(kept), "of": self.teacher.vocabulary, "coverage": vocab_trim.coverage(counted, kept),
        }  # fmt: skip
        return kept

    # ---------------------------------------------------------------- training
    def train(self, config: DraftConfig, student: Student, source: Source, held_out: TextRows) -> Trained:
        """Train, or go on where an interrupted run stopped; how it went is in the facts."""
        teacher: Teacher | TeacherCache | None = self.teacher if student.objective.needs_teacher else None
        if config.teacher_top is not None and teacher is not None:
            assert isinstance(source, TextRows)  # `checks.check_trained`
            teacher = self.cached(config.teacher_top, config, student, source)
        with self.team.in_turn():
            directory = training(self.work, config, [self.fingerprint, self.rows, self.facts.get("model")])
        trained = train(
            student, source, teacher, held_out, self.teacher, config.options(),
            directory=directory, resume=True, accelerator=self.team.accelerator, device=self.teacher.device, progress=self.reporter,
        )  # fmt: skip
        self.team.leave()
        facts = trained.facts()
        del facts["seconds"]  # the same recipe gives the same bytes
        # What it was worth before and is worth after is measured on what is stored; the curve alone is of the weights in training.
        self.facts["training"] = {key: value for key, value in facts.items() if key not in ("before", "after")}
        return trained

    def cached(self, top: int, config: DraftConfig, student: Student, rows: TextRows) -> TeacherCache:
        """The teacher's likeliest tokens at the rows, computed once."""
        kept = None if student.kept is None else student.kept.cpu()
        place = part(self.work, "teacher", [self.fingerprint, rows.ids, top, config.temperature, kept])
        with self.team.in_turn():
            self.reporter.phase("teacher", -(-len(rows) // 8))
            return cache_teacher(
                self.teacher, rows, place, k=min(top, student.width), temperature=config.temperature, kept=kept,
                told=lambda done, every: self.reporter.step(f"{done} of {every} rows"),
            )  # fmt: skip

    # ---------------------------------------------------------------- what it is worth
    def measure(self, config: DraftConfig, student: Student, held_out: TextRows) -> dict[str, Any]:
        """Acceptance on held-out rows and on each kind of sample; it moves the student to where the teacher is."""
        student.to(self.teacher.device)
        found = {}
        for kind, rows in {"held_out": held_out, **{kind: TextRows(ids) for kind, ids in self.kinds.items()}}.items():
            # At most half of what is continued, so that there are steps to count.
            length = min(config.tokens, max(1, rows.length // 4))
            found[kind] = measure_acceptance(student, self.teacher, rows, length=length, texts=self._texts(rows))
        return found

    def _texts(self, rows: TextRows) -> Texts | None:
        """What the target writes after the beginnings of rows: once, for all that is measured on them."""
        if not self.teacher.writes:
            return None
        name = digest_of(rows.ids)
        if name not in self.texts:
            self.texts[name] = target_texts(self.teacher, rows)
        return self.texts[name]

    def note_cost(self, student: Student, read: float, whole: float) -> None:
        """What a draft costs, and what it promised before training and promises now, into the facts.

        Args:
            read: bytes of weights of one pass of the draft. whole: of one of the target.
        """
        cost = read / whole
        self.facts["cost"] = {
            "bytes": round(read), "of_target": cost, "tokens": student.levels if student.one_pass else 1,
        }  # fmt: skip
        self.facts["worth"] = {
            when: worth(self.facts[when], cost, one_pass=student.one_pass) for when in ("before", "after")
        }

    # ---------------------------------------------------------------- writing
    def settle(self, student: Student, **more: Any) -> None:
        """What the written draft costs and promises into the facts, and these into its directory.

        Args:
            more: for draft.json.
        """
        self.note_cost(student, read_bytes(self.output, student), read_bytes(self.artifact, Student(student.draft)))
        note_facts(self.output, self.facts, **more)

    def write(self, config: DraftConfig, student: Student, **more: Any) -> None:
        """The draft's directory, its weights stored as the config says; the student then has the numbers that are stored.

        Args:
            more: as of `write_draft`.
        """
        draft: Any = student.draft
        plain = config.quantize == "none"
        where = self.output if plain else self.work / "dense"
        kept = None if student.kept is None else student.kept.cpu()
        write_draft(where, draft, self.facts, method=config.method, target=self.fingerprint, kept=kept, **more)
        if not plain:
            compact(where, self.output, config.quantize, trimmed=student.kept is not None)
            shutil.rmtree(where)
        read_back(student, self.output)


def read_bytes(directory: Path, student: Student) -> int:
    """Bytes of weights that one token of a draft reads: all but the embeddings, and of a trimmed head its part."""
    from runtime.checkpoint.checkpoint import Checkpoint

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
