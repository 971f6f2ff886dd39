"""Frequency: tokens are ranked by how often they occur in text like that which the model is for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod


class FrequencyConfig(StructureConfig):
    """Remove the tokens that occur least often in the calibration text; of those that never do, the ones with the largest ids.

    What occurs there stays, as do special tokens and those without which some texts could not be written: the tokenizer is rewritten, and
    texts whose tokens all stay are read as before. A cut that is too deep for that is refused.
    """

    method: Literal["frequency"] = Field("frequency", description="Name of the method.")
    remove: Literal["vocabulary"] = Field("vocabulary", description="What: tokens of the vocabulary.")


METHOD = StructureMethod(
    FrequencyConfig,
    lambda view, _: view.occurrences.double(),
    summary="removes the tokens that occur least often in the calibration text",
    paper="Ushio et al., An Efficient Multilingual Language Model Compression through Vocabulary Trimming, 2023, arXiv 2305.15020",
    removes={"vocabulary"},
    needs={"occurrences"},
)
