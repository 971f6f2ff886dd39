"""Speech encoder-decoder that `runtime.load` returns: a sound in, its transcript out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.api.audio import Listener, load_listener
from runtime.api.seq2seq import Seq2SeqModel
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.export_directory import Export
from runtime.decoding.seq2seq import Seq2SeqRequest, SpeechPrompts
from runtime.engines.base import Seq2SeqEngine
from runtime.errors import RequestError
from runtime.sampling.options import GenerationOptions
from runtime.sampling.prompts import Prompts


class SpeechModel(Seq2SeqModel):
    """A loaded speech encoder-decoder. Made by `runtime.load`. Attributes as `Seq2SeqModel`'s, and

    Attributes:
        listener: turns sounds into features; None where the directory has no feature extractor (features still work).
    """

    def __init__(
        self, engine: Seq2SeqEngine, tokenizer: Any, artifact: Artifact | Export, eos_token_ids: frozenset[int]
    ) -> None:
        super().__init__(engine, tokenizer, artifact, eos_token_ids)
        self.listener = load_listener(artifact.path)
        self._prompts = SpeechPrompts(artifact, engine.vocab_size)
        bins = artifact.config.get("num_mel_bins")
        self._bins = bins if isinstance(bins, int) else None

    def generate(
        self, source: Any = None, *, language: str | None = None, task: str | None = None, **options: Any
    ) -> Any:
        """What is said in a sound, or in each of a list of sounds.

        Args:
            source: the path of a .wav file (16-bit PCM, at `listener.rate`), a waveform (floats `[samples]` at that rate: a tensor, an
                array or a list), features (floats `[a, b]` as the feature extractor gives them), or a list of any of these (a tensor of
                three dimensions is a list of features). A sound must fit the window that the model hears at once.
            language: a code or English name, as the checkpoint's generation_config.json has it; None: what that file says, and where it
                leaves the language open, the one that is detected.
            task: as that file names it; None: its default.
            options: as `Seq2SeqModel.generate`'s.

        Returns:
            A text (a list of texts), or where there is no tokenizer the new token ids (a list of lists).

        Raises:
            RequestError: an unknown option, language or task, a sound that cannot be read or is too long.
        """
        chosen = GenerationOptions.from_keywords(options, "generate", self.eos_token_ids)
        beginning = self._prompts.beginning(language, task)
        sounds = self._read(source)
        # Sounds of one shape are decoded together, so that none is padded.
        groups: dict[torch.Size, list[int]] = {}
        for number, features in enumerate(sounds.ids):
            groups.setdefault(features.shape, []).append(number)
        request = Seq2SeqRequest(self._decoding(), sounds, chosen, beginning, list(groups.values()))
        return request.complete(self._store)

    def logits(
        self,
        input_features: Any,
        decoder_input_ids: torch.Tensor | Sequence[Sequence[int]],
        attention_mask: None = None,
    ) -> torch.Tensor:
        """Logits of every position of a transcript that is given: float32 `[batch, target, vocab]` on the model's device.

        Args:
            input_features: of the sounds, floats `[batch, a, b]`.
            decoder_input_ids: the transcripts, integers `[batch, target]`, each beginning with the start token.
            attention_mask: must be None: sounds have none.

        Raises:
            RequestError: wrong shapes, ids outside the vocabulary, rows longer than the context.
        """
        if attention_mask is not None:
            raise RequestError("attention_mask: features of sounds have none; leave it out")
        features = _tensor(input_features, "input_features")
        if features.dim() != 3 or not features.numel():
            raise RequestError(f"input_features must be floats of shape [batch, a, b], not {list(features.shape)}")
        rows = torch.stack([self._checked(row, f"row {i} of input_features") for i, row in enumerate(features)])
        return self._logits("input_features", rows, decoder_input_ids, None)

    # ---------------------------------------------------------------- sounds
    def _read(self, source: Any) -> Prompts:
        """Features in the place of token ids."""
        is_text = self.tokenizer is not None
        parts: Any = None
        if _is_array(source):
            whole = _tensor(source, "the source")
            parts = list(whole) if whole.dim() == 3 else None
        elif not isinstance(source, (str, Path)):
            is_list = isinstance(source, (list, tuple))
            if not is_list or not source:
                given = "an empty list" if is_list else f"a {type(source).__name__}"
                raise RequestError(f"source must be a .wav file, a waveform, features, or a list of these, not {given}")
            parts = None if all(isinstance(value, (int, float)) for value in source) else source
        if parts is None:
            return Prompts([self._one(source, "the source")], is_text, False)
        return Prompts([self._one(part, f"source {i}") for i, part in enumerate(parts)], is_text, True)

    def _one(self, source: Any, name: str) -> torch.Tensor:
        """Features of a file, a waveform or features."""
        if isinstance(source, (str, Path)):
            return self._listener(name).file(Path(source))
        values = _tensor(source, name)
        if values.dim() == 1:
            return self._listener(name).features(values, name)
        return self._checked(values, name)

    def _listener(self, name: str) -> Listener:
        if self.listener is None:
            raise RequestError(
                f"{self.artifact.path} has no feature extractor (preprocessor_config.json): {name} must be features"
            )
        return self.listener

    def _checked(self, features: torch.Tensor, name: str) -> torch.Tensor:
        shape = None if self.listener is None else self.listener.shape
        wrong = features.dim() != 2 or not features.numel()
        if wrong or (shape is not None and tuple(features.shape) != shape) or self._bins not in (None, *features.shape):
            wanted = f"features of shape {list(shape)}" if shape else "features of two dimensions"
            bins = f" with {self._bins} mel bins" if self._bins and not shape else ""
            raise RequestError(
                f"{name} must be {wanted}{bins} or a waveform of one dimension, not numbers of shape {list(features.shape)}"
            )
        if not bool(torch.isfinite(features).all()):
            raise RequestError(f"{name} has features that are NaN or infinite")
        return features.float()


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or hasattr(value, "__array__")


def _tensor(value: Any, name: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise RequestError(f"{name} must be a .wav file, a waveform or features: {error}") from error
    if tensor.dtype == torch.bool or tensor.is_complex() or not tensor.is_floating_point():
        raise RequestError(f"{name} must be floats, not {str(tensor.dtype).removeprefix('torch.')}")
    return tensor
