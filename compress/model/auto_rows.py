"""Length and number of text rows that a recipe leaves to the model (`auto`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from compress.core import resources
from compress.data.vision import has_images
from compress.recipe.models import BUNDLED, Recipe, TextSource
from runtime.engines.torch.encoder import position_limit
from runtime.modeling.skeleton import read_config, reads_features, reads_images

if TYPE_CHECKING:
    from compress.model.streamed import StreamedModel
    from runtime.checkpoint.checkpoint import Checkpoint

SMALL = 32 * 2**20
"""Largest checkpoint, in bytes, with rows of 256 tokens: such models are for trials, which should take seconds."""

SHORT, LONG = 256, 4096
"""Tokens per row: for small models, and at most for others."""

TOKENS = 128 * SHORT
"""Smallest total number of tokens."""

TOKENS_PER_INPUT = 8
"""Total tokens per input of the widest layer; with fewer, its Hessian is mostly noise."""

LEAST_ROWS = 16
"""Rows that calibration text should yield (evaluation text half as many); for shorter texts, rows are shortened."""

BATCH_TOKENS = 2048
"""Tokens per batch (at least one row), as of 8 rows of 256, so that longer rows take hardly more memory."""

_CHARACTERS = 4  # bytes of text per token, approximately
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "hidden_size", "n_embd", "d_model")

Source = TypeVar("Source", bound=TextSource)


def settle(recipe: Recipe, streamed: StreamedModel, original: Checkpoint) -> Recipe:
    """The recipe with `auto` resolved, the same at every stage: structural pruning changes neither positions nor `original`.

    Args:
        streamed: the current model. original: the checkpoint that the recipe names.
    """
    hears, limit = reads_features(streamed.model), position_limit(streamed.model)
    most = SHORT if original.total_bytes <= SMALL or hears or limit is None else LONG
    if limit is not None and not hears:
        most = max(2, min(most, limit))
    longest = LONG if limit is None else min(LONG, limit)

    def shown(source: TextSource) -> bool:
        """Whether rows are images with text, which vary in length and are not packed."""
        return reads_images(streamed.model) and has_images(source)

    calibration, evaluate = recipe.calibration, recipe.evaluate
    length, samples, is_open = calibration.sequence_length, calibration.samples, calibration.is_auto("sequence_length")
    if is_open and shown(calibration):
        length = longest
    elif is_open:
        length = _fitting(calibration, "calibration", most, LEAST_ROWS * (1 + calibration.shared))
        if calibration.is_auto("samples") and length > SHORT:
            samples = max(LEAST_ROWS, math.ceil(max(TOKENS, TOKENS_PER_INPUT * _widest(original)) / length))
    calibration = _with(calibration, length, samples)
    if evaluate is not None:
        own = evaluate.sequence_length
        if evaluate.is_auto("sequence_length") and not calibration.shared and shown(evaluate):
            own = longest
        elif evaluate.is_auto("sequence_length"):
            own = length if calibration.shared else _fitting(evaluate, "heldout", most, LEAST_ROWS // 2)
            own = min(own, length) if is_open else own
        evaluate = _with(evaluate, own, evaluate.samples)
    return recipe.model_copy(update={"calibration": calibration, "evaluate": evaluate})


def _with(source: Source, length: int, samples: int | None) -> Source:
    batch = source.batch_size
    if source.is_auto("batch_size") and source.is_auto("sequence_length"):
        batch = max(1, min(batch, BATCH_TOKENS // length))
    return source.settled({"sequence_length": length, "samples": samples, "batch_size": batch})


def _fitting(source: TextSource, bundled: str, most: int, rows: int) -> int:
    """Tokens per row, at most `most`, so that the texts of a section yield `rows` rows, estimated from file sizes."""
    length = most
    for text in source.texts:
        files = [resources.bundled_text(bundled)] if text.data == BUNDLED else text.candidates()
        size = next((file.stat().st_size for file in files if file.is_file()), None)
        while size is not None and length > SHORT and size < rows * text.share * length * _CHARACTERS:
            length = max(SHORT, length // 2)
    return length


def _widest(original: Checkpoint) -> int:
    """Inputs of the widest layer, according to the config."""
    config = read_config(original.path).get_text_config()
    return max((size for name in _WIDTHS if isinstance(size := getattr(config, name, None), int)), default=0)
