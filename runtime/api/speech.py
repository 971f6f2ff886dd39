"""Speech encoder-decoder that `runtime.load` returns: a sound in, its transcript out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.api.audio import Listener
from runtime.api.seq2seq import Seq2SeqModel, grouped, read_options
from runtime.checkpoint.artifact import Artifact
from runtime.decoding.seq2seq import SpeechPrompts
from runtime.decoding.turns import Caller
from runtime.engines.base import Seq2SeqEngine
from runtime.errors import RequestError
from runtime.sampling.prompts import read_ids


@dataclass(frozen=True)
class _Sounds:
    features: list[torch.Tensor]
    are_batch: bool


class SpeechModel(Seq2SeqModel):
    """A loaded speech encoder-decoder. Made by `runtime.load`. Attributes as `Seq2SeqModel`'s, and

    Attributes:
        listener: turns sounds into features; None where the directory has no feature extractor (features still work).
    """

    def __init__(
        self,
        engine: Seq2SeqEngine,
        tokenizer: Any,
        artifact: Artifact,
        eos_token_ids: frozenset[int],
        start_token_id: int,
        forced_token_id: int | None,
        listener: Listener | None,
    ) -> None:
        super().__init__(engine, tokenizer, artifact, eos_token_ids, start_token_id, forced_token_id)
        self.listener = listener
        self._prompts = SpeechPrompts(
            artifact.path, artifact.config, start_token_id, forced_token_id, engine.vocab_size
        )
        bins = artifact.config.get("num_mel_bins")
        self._bins = bins if isinstance(bins, int) else None

    def generate(self, source: Any, *, language: str | None = None, task: str | None = None, **options: Any) -> Any:
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
        chosen = read_options(options)
        beginning = self._prompts.beginning(language, task)
        sounds = self._read(source)
        are_text = self.tokenizer is not None
        outputs = self._outputs(len(sounds.features), are_text, beginning.length, chosen)
        # Sounds of one shape are decoded together, so that none is padded.
        alike: dict[torch.Size, list[int]] = {}
        for number, features in enumerate(sounds.features):
            alike.setdefault(features.shape, []).append(number)
        groups = [group for numbers in alike.values() for group in grouped(numbers)]
        self._decode(groups, lambda rows: torch.stack([sounds.features[i] for i in rows]), beginning, chosen, outputs)
        results = [output.text if are_text else list(output.tokens) for output in outputs]
        return results if sounds.are_batch else results[0]

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
        target = read_ids(decoder_input_ids, "decoder_input_ids")
        if len(rows) != len(target):
            raise RequestError(
                f"input_features has {len(rows)} rows and decoder_input_ids {len(target)}: they must be as many"
            )
        for number, row in enumerate(target.tolist()):
            self._decoded.check(row, f"row {number} of decoder_input_ids")
        device, caller = self.engine.device, Caller(self._turns)
        states = caller.run(self.engine.encode, rows.to(device), None)
        return caller.run(self.engine.decode, target.to(device), states, None, None)

    # ---------------------------------------------------------------- sounds
    def _read(self, source: Any) -> _Sounds:
        if isinstance(source, (str, Path)) or _is_array(source):
            if not isinstance(source, (str, Path)) and (whole := _tensor(source, "the source")).dim() == 3:
                return _Sounds([self._checked(part, f"source {i}") for i, part in enumerate(whole)], True)
            return _Sounds([self._one(source, "the source")], False)
        if not isinstance(source, (list, tuple)) or not source:
            raise RequestError(
                "source must be a .wav file, a waveform, features, or a list of these, not "
                + ("an empty list" if isinstance(source, (list, tuple)) else f"a {type(source).__name__}")
            )
        if all(isinstance(value, (int, float)) for value in source):
            return _Sounds([self._one(source, "the source")], False)
        return _Sounds([self._one(part, f"source {i}") for i, part in enumerate(source)], True)

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
