"""Short tones with transcripts, as a directory that models which hear are calibrated on."""

from __future__ import annotations

import wave
from pathlib import Path

import torch

RATE = 16000


def write_wav(path: Path, samples: torch.Tensor, rate: int = RATE, channels: int = 1) -> Path:
    """Floats in -1 to 1, `[samples]` or `[samples, channels]`, as 16-bit PCM."""
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes((samples * (2**15 - 1)).round().to(torch.int16).numpy().tobytes())
    return path


def write_sounds(folder: Path, count: int) -> Path:
    """s0.wav, s0.txt, ...: tones of several heights in noise, three quarters of a second and more, transcripts of two lengths."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        time = torch.arange(12000 + 400 * (number % 4)) / RATE
        noise = 0.02 * torch.randn(len(time), generator=generator)
        write_wav(folder / f"s{number}.wav", 0.3 * torch.sin(2 * torch.pi * (150 + 90 * number) * time) + noise)
        (folder / f"s{number}.txt").write_text(
            f" tone {number % 10} here" + "." * (number % 2) + "\n", encoding="utf-8"
        )
    return folder
