"""The small files that make a checkpoint complete."""

from __future__ import annotations

import shutil
from pathlib import Path

from compress.pipeline.files import written_beside

# Weights in any other format, code and pickles stay behind.
COMPANIONS = (
    "generation_config.json", "tokenizer*.json", "tokenizer.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json",
    "spiece.model", "*.bpe.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template*", "preprocessor_config.json",
    "processor_config.json", "normalizer.json", "LICENSE*", "NOTICE*",
    # What sentence-transformers says about pooling; its modules have a folder each.
    "modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "[0-9]*_*/config.json",
)  # fmt: skip


def copy_companions(source: Path, target: Path) -> None:
    """Copy them from one checkpoint directory to another."""
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                place = target / file.relative_to(source)
                place.parent.mkdir(exist_ok=True)
                with written_beside(place) as temporary:
                    shutil.copyfile(file, temporary)
