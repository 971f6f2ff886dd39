"""Common base of the models that `runtime.load` returns: an engine that threads share, a tokenizer, statistics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.export_directory import Export
from runtime.decoding.request import Decoding
from runtime.decoding.turns import Caller, Turns
from runtime.errors import ArtifactError, first_line
from runtime.modeling.skeleton import needs_code
from runtime.sampling.prompts import PromptReader
from runtime.sampling.stats import GenerationStats

Result = TypeVar("Result")
#: What is generated is of the kind of what is given: a text, token ids, or a list of either.
Texts = TypeVar("Texts", str, list[str], list[int], list[list[int]])


def from_pretrained(loader: str, path: Path, files: Sequence[str], what: str, **options: Any) -> Any:
    """What a class of transformers reads from a directory; None where it has none of `files`.

    Raises:
        ArtifactError: it cannot be read; `what` is what the message calls it.
    """
    if not any((path / name).is_file() for name in files):
        return None
    import transformers

    options = {"trust_remote_code": False, **options}  # their default asks at a terminal whether to run the code
    try:
        return getattr(transformers, loader).from_pretrained(str(path), **options)
    except Exception as error:  # transformers raises whatever comes up, bare Exception and ImportError included
        if not options["trust_remote_code"] and "trust_remote_code" in str(error):
            raise ArtifactError(needs_code(f"the {what} in {path}", "its config", False)) from error
        raise ArtifactError(f"the {what} in {path} cannot be read: {first_line(error)}") from error


class LazyTokenizer:
    """A directory's tokenizer, read when it is first used."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._tokenizer: Any = None

    def now(self) -> Any:
        """Transformers' tokenizer."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read()
            return self._tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now(), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """As the tokenizer's."""
        return self.now()(*arguments, **options)


class LoadedModel:
    """A model and what it was loaded from. Threads may call everything at once: they take turns on the engine.

    Attributes:
        artifact: the directory it came from.
        engine: what computes.
    """

    engine: Any

    def __init__(self, engine: Any, tokenizer: Any, artifact: Artifact | Export) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self.artifact = artifact
        self._turns = Turns()
        self._reader = PromptReader(tokenizer, artifact.path, engine.vocab_size, engine.context_length)

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the directory; None when it has none (token ids still work)."""
        return self._tokenizer.now() if isinstance(self._tokenizer, LazyTokenizer) else self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        """Another one, or none."""
        self._tokenizer = tokenizer

    def _run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """A call of the engine, when it is this thread's turn."""
        return Caller(self._turns).run(function, *arguments)

    def explain(self) -> dict[str, str]:
        """{layer: the kernel that computes it}; of a compressed cache {"kv_cache.LAYER": the kernel that steps read it with}.

        Where transformers' modules compute what a native engine could not, "model" says which operation that does not know.
        """
        return dict(self.engine.explain())


class GeneratingModel(LoadedModel):
    """A model that generates tokens. Attributes as `LoadedModel`'s, and

    Attributes:
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, engine: Any, tokenizer: Any, artifact: Artifact | Export, eos_token_ids: frozenset[int]) -> None:
        super().__init__(engine, tokenizer, artifact)
        self.eos_token_ids = eos_token_ids
        self._last = GenerationStats()  # of the last call in any thread
        self._own = threading.local()  # .last: of the last call that this thread ended

    def _decoding(self) -> Decoding:
        return Decoding(self.engine, self._turns, self._tokenizer, self.eos_token_ids, self.artifact.path)

    def _store(self, stats: GenerationStats) -> None:
        self._last = self._own.last = stats

    def _last_stats(self) -> GenerationStats:
        """Of the last call that ended in this thread; in a thread that has had none, of the last one in any."""
        return getattr(self._own, "last", self._last)

    @property
    def stats(self) -> dict[str, Any]:
        """Numbers of the last call that generated (see `GenerationStats`); `weight_bytes`, memory that the packed weights take; `engine`.

        Of the last one that ended in the thread that asks; in a thread that has had none, of the last one in any.
        """
        return {
            **self._last_stats().as_dict(),
            "weight_bytes": self.engine.weight_bytes,
            "engine": self.engine.description,
        }
