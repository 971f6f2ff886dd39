"""What a run works on: the source model, which layers get what, and the calibration batches. Shared by `plan` and `apply`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress import data as calibration
from compress.core.memory_bounds import Bounds, cut
from compress.core.version import VERSION
from compress.distill.draft.stage import DraftJob, check_draft
from compress.kv_cache.stage import check_cache
from compress.model.dry_run import check_runs
from compress.model.float8_source import open_checkpoint
from compress.model.source import SourceCheckpoint
from compress.model.streamed import Batch, StreamedModel
from compress.model.supported import check_fits_model, check_shared, check_streams, module_infos, reads_beside
from compress.recipe import Recipe, locate_model
from compress.weights.assign import Left, lay_out
from compress.weights.fixed import HELD, Held
from compress.weights.fixed import load as load_held
from compress.weights.layer_work import LayerWork
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.engines.torch.encoder import position_limit
from runtime.engines.torch.seq2seq import target_limit
from runtime.errors import RequestError
from runtime.modeling.skeleton import reads_features

if TYPE_CHECKING:
    from compress.distill.recover.job import RecoverJob
    from compress.prune.structure.job import StructureJob
    from compress.prune.structure.vocabulary import Tokens
    from runtime.kv_cache.policy.policy import Policy

PROBE_TOKENS = 64


def choose_device(device: str) -> torch.device:
    """`auto` is the first GPU when there is one; anything torch does not know is a RequestError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise RequestError(
            f"device {device!r} cannot be used here: {str(error).splitlines()[0]}; use auto, cpu or cuda"
        ) from error
    return chosen


@dataclass
class Session:
    """Everything that is known before the first layer is touched.

    Attributes:
        checkpoint: whose layers are compressed. source: what the recipe names, where other stages have made `checkpoint` of it.
        draft: what the recipe's draft stage asks for, if it has one.
        jobs: of the stages that come before (`compress.run.passes`).
        held: {layer: what a recovery before has left that is not to be chosen again}.
        bounds: what is done to need less memory; see `bind`.
        left: layers that default targets mean and that stay as they are.
    """

    recipe: Recipe
    checkpoint: SourceCheckpoint
    streamed: StreamedModel
    work: dict[str, LayerWork]
    draft: DraftJob | None = None
    source: Checkpoint | None = None
    jobs: tuple[StructureJob | RecoverJob, ...] = ()
    held: dict[str, Held] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)
    left: tuple[Left, ...] = ()

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        device: str = "auto",
        checkpoint: Checkpoint | None = None,
        source: Checkpoint | None = None,
        settled: int = -1,
    ) -> Session:
        """Hold the recipe against a model: its own, or `checkpoint`, which was made of `source`.

        Args:
            settled: number of the last recovery stage that has made it; what was compressed before that stays.
        """
        checkpoint = open_checkpoint(checkpoint or locate_model(recipe))
        streamed = StreamedModel(checkpoint, choose_device(device), apart=True)
        check_fits_model(recipe, streamed)
        check_cache(recipe, streamed)
        infos = module_infos(streamed)
        assigned, left = lay_out(recipe, infos)
        work = {name: LayerWork(assignment, settled=settled) for name, assignment in assigned.items()}
        head = streamed.model.get_output_embeddings()
        beside = reads_beside(streamed)
        inside = any(streamed.is_inside(name) for name in work)
        for name, layer in list(work.items()):
            module = streamed.model.get_submodule(name)
            if isinstance(module, nn.Embedding) and (layer.needs or layer.scheme.activations is not None):
                methods = ", ".join(m.name for m in layer.methods)
                raise RequestError(
                    f"{name} is an embedding, which {methods} cannot compress; use method rtn with a weight-only scheme for it"
                )
            if streamed.is_inside(name) or module is head or isinstance(module, nn.Embedding):
                continue
            where = "in no block and is no output head"
            if layer.needs and not (inside and layer.assignment.by_default):
                text = (
                    f"{name} is {where}, so calibration does not reach it; use method rtn for it, or name it in ignore"
                )
                raise RequestError(text)
            if layer.needs:
                left.append(Left(name, f"it is {where}, so calibration does not reach it"))
                del work[name]
            elif beside and inside and layer.assignment.by_default:
                # What layers read beside hidden states is computed with it, before it is compressed.
                left.append(Left(name, f"it is {where}, and what layers read beside hidden states depends on it"))
                del work[name]
        check_shared(streamed, work)
        if (
            source is None or source.path == checkpoint.path
        ):  # else asked of the source: which layers stay may not be known yet
            check_runs(streamed, work)
        file = checkpoint.path / HELD
        held = load_held(file) if settled >= 0 and file.is_file() else {}
        session = cls(recipe, streamed.checkpoint, streamed, work, source=source, held=held, left=tuple(left))
        if session.reads_text or recipe.evaluate is not None:
            check_streams(streamed)
        session.draft = check_draft(session)
        return session

    @classmethod
    def plain(
        cls, recipe: Recipe, checkpoint: Checkpoint, device: str = "auto", source: Checkpoint | None = None
    ) -> Session:
        """A checkpoint of which no layer is compressed, with the recipe's text; `source`: what it was made of."""
        if source is not None and source.path == checkpoint.path:
            source = None
        streamed = StreamedModel(checkpoint, choose_device(device))
        check_fits_model(recipe, streamed)
        check_streams(streamed)
        return cls(recipe, streamed.checkpoint, streamed, {}, source=source)

    @property
    def original(self) -> Checkpoint:
        """The checkpoint that the recipe names."""
        return self.checkpoint if self.source is None else self.source

    @cached_property
    def reference(self) -> StreamedModel:
        """The recipe's model, which the artifact is compared with."""
        return self.streamed if self.source is None else StreamedModel(self.source, self.streamed.device, apart=True)

    # ------------------------------------------------------------ tokens
    @property
    def cut_tokens(self) -> list[Tokens]:
        """What earlier stages have left of the vocabulary, one after the other; empty: all of it."""
        found = (getattr(job, "tokens", None) for job in self.jobs)
        return [tokens for tokens in found if tokens is not None]

    def source_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The recipe's model's ids of the same tokens."""
        for tokens in reversed(self.cut_tokens):
            ids = tokens.kept[ids]
        return ids

    # ------------------------------------------------------------ calibration
    @property
    def needs_data(self) -> bool:
        """Whether weights are compressed by what calibration text does to them."""
        return any(w.needs for w in self.work.values())

    @property
    def reads_text(self) -> bool:
        """Whether anything is calibrated on text: the weights, or the cache. A draft has rows of its own."""
        cache = self.cache_policy is not None and bool(self.cache_policy.missing)
        return self.needs_data or cache or any(job.needs for job in self.jobs)

    @property
    def cache_policy(self) -> Policy | None:
        """How keys and values will be held, before calibration; None without a stage that says it."""
        stage = self.recipe.cache_stage
        return None if stage is None else stage.config

    @cached_property
    def tokenizer(self) -> Any:
        """Of the model that is compressed."""
        return _tokenizer(self.checkpoint)

    @cached_property
    def source_tokenizer(self) -> Any:
        """Of the recipe's model."""
        return _tokenizer(self.original)

    @property
    def vocabulary(self) -> int:
        return int(self.streamed.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]

    @property
    def source_vocabulary(self) -> int:
        """Of the recipe's model."""
        return int(self.reference.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]

    @cached_property
    def speech(self) -> calibration.SpeechReader | None:
        """How the model that is compressed hears and writes; None: it reads text."""
        if not reads_features(self.streamed.model):
            return None
        reads = self.reads_text or self.recipe.evaluate is not None
        tokenizer = self.tokenizer if reads else None
        limit = target_limit(self.streamed.model)
        return calibration.SpeechReader.of(Artifact(self.checkpoint.path), tokenizer, self.vocabulary, limit)

    @cached_property
    def calibration(self) -> calibration.CalibrationData:
        if self.speech is not None:
            return calibration.load_speech(self.recipe.calibration, self.speech)
        return calibration.load(self.recipe.calibration, self.tokenizer, self.vocabulary)

    @cached_property
    def batches(self) -> list[Batch]:
        """Calibration batches; a mask only where a batch has padding."""
        parts = [part for batch in self.calibration.batches for part in cut(batch, self.bounds.rows)]
        batches = [(ids, None if bool(mask.all()) else mask) for ids, mask in parts]
        return [(self.framed(ids) if mask is None else ids, mask) for ids, mask in batches]

    def bind(self, bounds: Bounds) -> None:
        """Keep to these bounds from now on."""
        self.bounds = bounds
        self.__dict__.pop("batches", None)

    def framed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `[n, s]` cut out of running text as an encoder knows rows: the first and the last token are its marks, if any."""
        first, last = getattr(self.tokenizer, "cls_token_id", None), getattr(self.tokenizer, "sep_token_id", None)
        if self.streamed.kind != "encoder" or first is None or last is None or ids.shape[1] < 3:
            return ids
        ids = ids.clone()
        ids[:, 0], ids[:, -1] = first, last
        return ids

    @cached_property
    def probe(self) -> torch.Tensor:
        """A row `[1, n]` that follows the pipeline through every block, so that the artifact can be held against it."""
        if self.speech is not None:
            return self.speech.probe(PROBE_TOKENS // 2)
        limit = min(PROBE_TOKENS, position_limit(self.streamed.model) or PROBE_TOKENS)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.vocabulary, (1, limit), generator=generator)

    # ------------------------------------------------------------ names
    def block_work(self, index: int) -> dict[str, LayerWork]:
        prefix = self.streamed.block_prefix(index)
        return {name: layer for name, layer in self.work.items() if name.startswith(prefix)}

    @property
    def outside_work(self) -> dict[str, LayerWork]:
        return {name: layer for name, layer in self.work.items() if not self.streamed.is_inside(name)}

    @property
    def untie(self) -> bool:
        """Whether a shared embedding must be split, because only one of its two uses (or both, packed) is compressed."""
        tied = self.streamed.ties
        shared = {n.rpartition(".")[0] for pair in tied.items() for n in pair}
        return any(name in shared for name in self.work)

    @cached_property
    def checkpoint_is_finite(self) -> bool:
        """False when a layer or tensor was skipped for NaN or Inf (recipes with `on_nonfinite: skip` only)."""
        if self.recipe.on_nonfinite == "fail":
            return True
        return all(
            bool(torch.isfinite(self.checkpoint.get(n)).all())
            for n in self.checkpoint.names()
            if self.checkpoint.dtype(n).is_floating_point
        )

    def recipe_digest(self, draft: bool) -> str:
        """SHA-256 (hex) of the recipe with every default filled in, with its draft stage or without."""
        data = self.recipe.resolved()
        data["stages"] = [stage for stage in data["stages"] if draft or "draft" not in stage]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def identity(self, evaluation: torch.Tensor | None) -> dict[str, Any]:
        """What must be equal for a resume to give the same bytes, but for the draft, which has an identity of its own (`DraftJob`): a draft
        stage that failed is corrected without compressing again."""
        identity: dict[str, Any] = {
            "recipe": self.recipe_digest(draft=False),
            "source_fingerprint": self.original.fingerprint(),
            "compress_version": VERSION,
        }
        identity["torch_version"] = torch.__version__
        identity["device"] = self.streamed.device.type
        if self.bounds.rows is not None:
            identity["batch_rows"] = self.bounds.rows
        if evaluation is not None:
            identity["evaluation_text"] = hashlib.sha256(evaluation.numpy().tobytes()).hexdigest()
        if self.reads_text:
            identity["calibration_text"] = self.calibration.sha256
        return identity


def _tokenizer(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(checkpoint.path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RequestError(
            f"{checkpoint.path} has no tokenizer that can be read ({first}), and text needs one"
        ) from error
