"""Sounds with transcripts for calibration and evaluation: a directory of .wav files, each with a .txt beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.data import speech_rows
from compress.data.documents import reading
from compress.data.held_out import choose, spread
from compress.data.rows import PROBE_TOKENS, CalibrationData, EvaluationData, digest, draw, hashed
from compress.data.tokens import check_vocabulary
from compress.recipe.models import BUNDLED, CalibrationConfig, EvaluateConfig, TextSet, TextSource
from runtime.api.audio import Listener, load_listener
from runtime.decoding.seq2seq import SpeechPrompts
from runtime.errors import RequestError

WANTED = "a directory of .wav files (16-bit PCM), each with its transcript beside it (talk.wav, talk.txt)"


@dataclass(frozen=True)
class SpeechReader:
    """How a model reads sounds and writes transcripts.

    Attributes:
        listener: computes features. tokenizer: returns the tokenizer of transcripts.
        prompts: what transcripts begin with. vocab_size: entries of the vocabulary.
        limit: tokens that the decoder reads at most, the start token included; None: any number.
    """

    path: Path
    listener: Listener
    tokenizer: Callable[[], Any]
    prompts: SpeechPrompts
    vocab_size: int
    limit: int | None

    @classmethod
    def of(cls, artifact: Any, tokenizer: Callable[[], Any], vocab_size: int, limit: int | None) -> SpeechReader:
        """Of a directory (`runtime.checkpoint.artifact.Artifact`).

        Raises:
            RequestError: it has no feature extractor. ArtifactError: one that cannot be read.
        """
        listener = load_listener(artifact.path)
        if listener is None:
            raise RequestError(f"{artifact.path} has no feature extractor (preprocessor_config.json) to hear with")
        prompts = SpeechPrompts(artifact, vocab_size)
        return cls(artifact.path, listener, tokenizer, prompts, vocab_size, limit)

    # ---------------------------------------------------------------- as `compress.data.rows.TextReader`
    def calibration(self, config: CalibrationConfig) -> CalibrationData:
        """`samples` sounds, drawn by `seed`. Batches hold sounds and transcripts of equal lengths, so that nothing is padded.

        Raises:
            RequestError: no such directory, nothing in it, or a sound or transcript that cannot be used.
        """
        folder, files = _sounds(config.text)
        if config.shared:
            files = _split(config.text, files)[0]
        chosen = draw(torch.arange(len(files)), config).tolist()
        alike: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        for row in self.rows(config, (files[i] for i in chosen)):
            alike.setdefault((int(row[0]), int(row[1]), len(row)), []).append(row)
        parts = [part for rows in alike.values() for part in torch.stack(rows).split(config.batch_size)]
        batches = [(part, torch.ones_like(part, dtype=torch.bool)) for part in parts]
        tokens = sum(speech_rows.transcript(part).numel() for part in parts)
        warning = ""
        if len(files) < config.samples:
            warning = config.at("samples", f"{folder} has only {len(files)} sounds; {config.samples} were asked for")
        return CalibrationData(
            batches=batches,
            tokens=tokens,
            rows=len(chosen),
            description=f"{len(chosen)} sounds with transcripts of {tokens:,} tokens from {folder.name}, seed {config.seed}",
            kind="named",
            sha256=digest(batches),
            warning=warning,
        )

    def evaluation(self, config: EvaluateConfig, calibration: CalibrationConfig) -> EvaluationData:
        """The sounds of a directory, sorted by name, at most `samples`.

        Raises:
            RequestError: as `calibration`; sounds that give features of different shapes.
        """
        source: TextSource = calibration if calibration.shared else config
        folder, files = _sounds(source.text)
        if calibration.shared:
            files = spread(_split(source.text, files)[1])
        rows = self.rows(source, files[: config.samples])
        shapes = {(int(row[0]), int(row[1])) for row in rows}
        if len(shapes) > 1:
            text = "the model does not pad sounds to one window, so all must be equally long to be evaluated together"
            raise RequestError(source.at("data", text))
        ids = speech_rows.together(rows)
        tokens = sum(speech_rows.transcript(row[None]).numel() for row in rows)
        where = f"the held-out part of {folder.name}" if calibration.shared else folder.name
        kind = "held out" if calibration.shared else "named"
        return EvaluationData(ids, len(rows), tokens, f"{where}, {len(rows)} sounds", kind, hashed(ids))

    def warnings(self, config: CalibrationConfig) -> list[str]:
        """As `TextReader.warnings`."""
        return []

    def probe(self) -> torch.Tensor:
        """A row `[1, n]` of noise with random tokens."""
        generator = torch.Generator().manual_seed(0)
        length = min(self.listener.rate, self.listener.most or self.listener.rate)
        noise = 0.1 * torch.randn(length, generator=generator)
        target = PROBE_TOKENS // 2
        count = target if self.limit is None else max(1, min(target, self.limit - 1))
        tokens = torch.randint(0, self.vocab_size, (count,), generator=generator).tolist()
        return speech_rows.pack(self.listener.features(noise, "the probe"), (), tokens)[None]

    # ---------------------------------------------------------------- directories
    def rows(self, source: TextSource, files: Iterable[Path]) -> list[torch.Tensor]:
        """One of each sound; see `compress.data.speech_rows`.

        Raises:
            RequestError: a sound or a transcript that cannot be used, or a language that nobody has named.
        """
        try:
            beginning = self.prompts.beginning(source.language)
        except RequestError as error:
            raise RequestError(source.at("language", str(error).removeprefix("language: "))) from None
        if beginning.languages:
            text = f"{self.path} hears which language is spoken; say here which one the transcripts are in, such as en"
            raise RequestError(source.at("language", text))
        forced = () if beginning.forced is None else (beginning.forced,)
        return [self._row(source, file, (*beginning.tokens[1:], *forced)) for file in files]

    def _row(self, source: TextSource, file: Path, prefix: tuple[int, ...]) -> torch.Tensor:
        written = file.with_suffix(".txt")
        with reading(source.text, written, "; every sound needs its transcript beside it"):
            text = written.read_text(encoding="utf-8-sig").rstrip("\r\n")
        tokenizer = self.tokenizer()
        tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not text.strip() or not tokens:
            raise RequestError(source.at("data", f"'{written}' holds no text"))
        if tokenizer.eos_token_id is not None:
            tokens = [*tokens, tokenizer.eos_token_id]
        check_vocabulary(torch.tensor(tokens), self.vocab_size, source.text, f"'{written}'")
        if len(tokens) > source.sequence_length:
            reason = f"'{written}' has {len(tokens)} tokens; raise it, or cut the sound into shorter ones"
            raise RequestError(source.at("sequence_length", reason))
        whole = 1 + len(prefix) + len(tokens)
        if self.limit is not None and whole > self.limit:
            reason = f"'{written}' has {whole} tokens, and the model writes {self.limit} at most; cut the sound into shorter ones"
            raise RequestError(source.at("data", reason))
        try:
            return speech_rows.pack(self.listener.file(file), prefix, tokens)
        except RequestError as error:
            raise RequestError(source.at("data", str(error))) from None


def _split(source: TextSet, files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Sounds for calibration, and held-out sounds."""
    if len(files) < 2:
        text = f"'{files[0].parent}' has only one sound, and evaluation needs a second; give more, or name others in evaluate.data"
        raise RequestError(source.at("data", text))
    out = choose([1] * len(files), 1 / 4)
    return tuple([file for file, apart in zip(files, out, strict=True) if apart is side] for side in (False, True))  # type: ignore[return-value]


def _sounds(source: TextSet) -> tuple[Path, list[Path]]:
    """The directory that `data` names, and the .wav files in it by name."""
    if source.data == BUNDLED:
        raise RequestError(source.at("data", f"the model reads speech, and none is bundled; give {WANTED}"))
    folder = next((path for path in source.candidates() if path.is_dir()), None)
    if folder is None:
        raise RequestError(source.at("data", f"'{source.data}' is no directory, and the model hears; give {WANTED}"))
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".wav" and path.is_file())
    if not files:
        raise RequestError(source.at("data", f"'{folder}' has no .wav files; give {WANTED}"))
    return folder, files
