"""Sound input of speech models: .wav files to waveforms, and waveforms to the features that an encoder takes."""

from __future__ import annotations

import threading
import wave
from pathlib import Path
from typing import Any

import torch

from runtime.api.base import from_pretrained
from runtime.errors import ArtifactError, RequestError, first_line

EXTRACTOR_FILES = ("preprocessor_config.json", "processor_config.json")


def read_wav(path: Path) -> tuple[torch.Tensor, int]:
    """The waveform of a .wav file, float32 `[samples]` in -1 to 1 (channels are averaged), and its samples a second.

    Raises:
        RequestError: no .wav file that holds 16-bit PCM, or one without a sample.
    """
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except OSError as error:
        raise RequestError(f"'{path}' cannot be read: {error.strerror or error}") from None
    except (wave.Error, EOFError) as error:
        raise RequestError(f"'{path}' is no .wav file of 16-bit PCM ({str(error) or 'it is cut short'})") from None
    if width != 2:
        raise RequestError(f"'{path}' has samples of {8 * width} bits; convert it to 16-bit PCM")
    count = len(raw) // (2 * channels)
    if not count:
        raise RequestError(f"'{path}' holds no sound")
    samples = torch.frombuffer(bytearray(raw), dtype=torch.int16)[: count * channels].view(count, channels)
    return samples.float().mean(dim=1) / 2**15, rate


class Listener:
    """Turns sound into features, by the checkpoint's own feature extractor.

    Attributes:
        rate: samples a second that it takes.
        most: samples of the longest sound that fits the encoder's window; None: any number.
        shape: of the features of all sounds, where they are equal (sounds are padded to the window), else None.
    """

    def __init__(self, extractor: Any) -> None:
        self._extractor = extractor
        self._lock = threading.Lock()  # extractors change settings inside while they compute
        self.rate = int(extractor.sampling_rate)
        most = getattr(extractor, "n_samples", None)
        self.most = most if isinstance(most, int) else None
        second = torch.zeros(self.rate if self.most is None else min(self.rate, self.most))
        self.shape = None if self.most is None else tuple(self.features(second, "silence").shape)

    def file(self, path: Path) -> torch.Tensor:
        """Features of a .wav file, as `features`.

        Raises:
            RequestError: as `read_wav`; another sampling rate; a sound that does not fit the window.
        """
        samples, rate = read_wav(path)
        if rate != self.rate:
            raise RequestError(
                f"'{path}' has {rate} samples a second and the model reads {self.rate}: resample it "
                f"(for instance: sox in.wav -r {self.rate} -b 16 out.wav)"
            )
        return self.features(samples, f"'{path}'")

    def features(self, samples: torch.Tensor, name: str) -> torch.Tensor:
        """Features, float32 `[a, b]` (mel bins and frames, in the order that the model reads), of a waveform.

        Args:
            samples: floats `[samples]`, as many a second as `rate` says.
            name: what messages call it.

        Raises:
            RequestError: no sound, numbers that are not finite, or longer than the window.
        """
        samples = samples.detach().cpu().float()
        if not len(samples) or not bool(torch.isfinite(samples).all()):
            raise RequestError(f"{name} must have samples, all of them finite")
        if self.most is not None and len(samples) > self.most:
            raise RequestError(
                f"{name} is {len(samples) / self.rate:.1f} s long and the model hears {self.most / self.rate:g} s at once: "
                "cut it into shorter files, best at pauses"
            )
        try:
            with self._lock:
                found = self._extractor(samples.numpy(), sampling_rate=self.rate, return_tensors="pt")
        except (ValueError, RuntimeError, AssertionError) as error:
            raise RequestError(f"{name} gives no features: {first_line(error)}") from None
        features: torch.Tensor = found["input_features"][0]
        if features.dim() != 2 or not features.numel():
            raise RequestError(f"{name} is too short: it gives features of shape {list(features.shape)}")
        return features.float()


def load_listener(path: Path) -> Listener | None:
    """Of the feature extractor in a directory; None where there is none.

    Raises:
        ArtifactError: it cannot be read, or gives something else than features.
    """
    extractor = from_pretrained("AutoFeatureExtractor", path, EXTRACTOR_FILES, "feature extractor")
    if extractor is None:
        return None
    if "input_features" not in getattr(extractor, "model_input_names", ()):
        raise ArtifactError(f"{path}: {type(extractor).__name__} does not turn sound into input_features")
    return Listener(extractor)
