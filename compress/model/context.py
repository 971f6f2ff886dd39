"""Context of a stage: a model streamed by block, the recipe's text in its tokens, and the bounds of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from compress import data
from compress.core.memory_bounds import Bounds, cut
from compress.core.tensors import finite
from compress.data.layout import ImageRows
from compress.model.auto_rows import settle
from compress.model.source import SourceCheckpoint
from compress.model.streamed import Batch, StreamedModel, with_prefix
from compress.recipe import Recipe
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.engines.torch.encoder import position_limit
from runtime.engines.torch.seq2seq import target_limit
from runtime.errors import RequestError, first_line
from runtime.modeling.skeleton import needs_code, reads_features
from runtime.system.device import choose_device

OTHER_TOKENS = (
    "the vocabulary was cut, so that source and artifact split texts into other tokens: perplexity is that of the text, a token of the "
    "source's, and KL divergence and agreement, which compare token by token, are not measured"
)


@dataclass
class Context:
    """Model, data and bounds that every stage reads.

    Attributes:
        recipe: gives text, seed and options, with `auto` resolved.
        opened: the model's checkpoint. streamed: the model.
        source: the checkpoint that the recipe names, where stages have made another of it; else None.
        records: what stages before have recorded (phase "model").
        kept_tokens: token ids that stages before have left, int64, one tensor a stage; empty: all of them.
        settled: index of the last stage that leaves layers as they were compressed before it; -1: none.
        bounds: measures to need less memory; see `bind`.
        reads_text: a stage is calibrated on text.
    """

    recipe: Recipe
    opened: Checkpoint
    streamed: StreamedModel
    source: Checkpoint | None = None
    records: tuple[Mapping[str, Any], ...] = ()
    kept_tokens: tuple[torch.Tensor, ...] = ()
    settled: int = -1
    bounds: Bounds = field(default_factory=Bounds)
    reads_text: bool = False

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        checkpoint: Checkpoint,
        device: str = "auto",
        source: Checkpoint | None = None,
        experts_apart: bool = False,
        **more: Any,
    ) -> Context:
        """The context of a checkpoint.

        Args:
            source: what it was made of; may be the checkpoint itself.
            experts_apart: routed experts are modules of their own, as they are compressed.
            more: further attributes.
        """
        if source is not None and source.path == checkpoint.path:
            source = None
        free = recipe.model_free
        streamed = StreamedModel(checkpoint, choose_device(device), apart=experts_apart, model_free=free)
        recipe = recipe if free else settle(recipe, streamed, source or checkpoint)
        return cls(recipe, checkpoint, streamed, source, **more)

    @property
    def checkpoint(self) -> SourceCheckpoint:
        """Tensors of the model by its names."""
        return self.streamed.checkpoint

    @property
    def path(self) -> Path:
        """Directory of the model."""
        return self.opened.path

    @property
    def original(self) -> Checkpoint:
        """The checkpoint that the recipe names."""
        return self.checkpoint if self.source is None else self.source

    @cached_property
    def reference(self) -> StreamedModel:
        """The recipe's model, which the artifact is compared with."""
        return self.streamed if self.source is None else StreamedModel(self.source, self.streamed.device, apart=True)

    # ------------------------------------------------------------ tokens
    def source_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The recipe's model's ids of the same tokens."""
        for kept in reversed(self.kept_tokens):
            ids = kept[ids]
        return ids

    @cached_property
    def tokenizer(self) -> Any:
        """Of the model."""
        return _tokenizer(self.checkpoint)

    @cached_property
    def source_tokenizer(self) -> Any:
        """Of the recipe's model."""
        return _tokenizer(self.original)

    @property
    def vocabulary(self) -> int:
        """Rows of the input embeddings."""
        return self.streamed.vocabulary

    # ------------------------------------------------------------ held-out text
    @property
    def windows(self) -> torch.Tensor | None:
        """Held-out ids `[n, s]` of the recipe's `evaluate`, or None when it asks for no evaluation; errors as of `evaluation`."""
        return None if self.evaluation is None else self.evaluation.ids

    @cached_property
    def evaluation(self) -> data.EvaluationData | None:
        """Held-out text of the recipe's `evaluate`, or None when it asks for no evaluation.

        Raises:
            RequestError: a text that cannot be used, or a limit on what cannot be measured.
        """
        config = self.recipe.evaluate
        if config is None:
            return None
        if self.kept_tokens and self.streamed.kind != "encoder":
            for name in ("max_kl", "min_agreement"):
                if name in config.limits():
                    raise RequestError(config.at(name, f"{OTHER_TOKENS}; set max_perplexity_increase in its place"))
            spans = self.same_text()[1]
            return data.EvaluationData.of(spans.ids, spans.where, spans.kind)
        found = self.reader.evaluation(config, self.recipe.calibration)
        framed = self.framed(found.ids)
        return found if framed is found.ids else replace(found, ids=framed, sha256=data.hashed(framed))

    def same_text(self) -> tuple[data.Spans, data.Spans]:
        """The evaluation text in the tokens of the recipe's model, and as much of it in those that are left of them."""
        config = self.recipe.evaluate
        assert config is not None
        text = self.recipe.calibration
        theirs = data.evaluation_spans(config, self.source_tokenizer, self.reference.vocabulary, text)
        return theirs, data.evaluation_spans(config, self.tokenizer, self.vocabulary, text, theirs)

    # ------------------------------------------------------------ calibration
    @cached_property
    def reader(self) -> data.TextReader | data.SpeechReader:
        """Reader of the data that the recipe's `calibration` and `evaluate` name."""
        model, arguments = self.streamed.model, (lambda: self.tokenizer, self.vocabulary)
        if reads_features(model):
            return data.SpeechReader.of(Artifact(self.path), *arguments, target_limit(model))
        limit = position_limit(model)
        if isinstance(self.streamed.rows, ImageRows):
            return data.ImageReader(*arguments, limit, self.path, model.config, self.streamed.rows)
        return data.TextReader(*arguments, limit)

    @cached_property
    def calibration(self) -> data.CalibrationData:
        """Rows of the recipe's calibration text (or images with text, or speech)."""
        return self.reader.calibration(self.recipe.calibration)

    @cached_property
    def batches(self) -> list[Batch]:
        """Calibration batches; a mask only where a batch has padding."""
        parts = [part for batch in self.calibration.batches for part in cut(batch, self.bounds.rows)]
        if prefix := self.streamed.prefix:
            parts = [(with_prefix(ids, prefix), with_prefix(mask, [True] * len(prefix))) for ids, mask in parts]
        batches = [(ids, None if bool(mask.all()) else mask) for ids, mask in parts]
        return [(self.framed(ids) if mask is None else ids, mask) for ids, mask in batches]

    def put_prefix(self, tokens: tuple[int, ...]) -> None:
        """Let calibration text and the artifact's evaluation begin with these tokens; see `StreamedModel.prefix`."""
        self.streamed.prefix = tokens
        self.__dict__.pop("batches", None)

    def bind(self, bounds: Bounds) -> None:
        """Set the bounds."""
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
        """A row `[1, n]` that goes through every block, by which the artifact is compared with the pipeline."""
        return self.reader.probe()

    @cached_property
    def checkpoint_is_finite(self) -> bool:
        """False when a layer or tensor was skipped for NaN or Inf (recipes with `on_nonfinite: skip` only)."""
        if self.recipe.on_nonfinite == "fail":
            return True
        return all(
            finite(self.checkpoint.get(n))
            for n in self.checkpoint.names()
            if self.checkpoint.dtype(n).is_floating_point
        )


def _tokenizer(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    try:
        # False and not the default, which would ask at a terminal whether to run the code.
        return AutoTokenizer.from_pretrained(str(checkpoint.path), trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise RequestError(
                needs_code(f"the tokenizer in {checkpoint.path}", "tokenizer_config.json", None)
            ) from error
        raise RequestError(
            f"{checkpoint.path} has no tokenizer that can be read ({first_line(error)}), and text needs one"
        ) from error
