"""Models that hear: what their outputs begin with, what they read, what calibrates them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES
from random_models import UNLIMITED
from safetensors.torch import load_file, save_file
from sounds import RATE, write_sounds, write_wav

import compress
import runtime
from compress.data import speech_rows
from compress.model.context import Context
from compress.recipe import load as load_recipe
from compress.run.session import Session
from runtime.api import audio
from runtime.api.speech import SpeechModel
from runtime.errors import RequestError

BY_NAME = {family.name: family for family in FAMILIES}
RTN = [{"quantize": {"method": "rtn", "scheme": "W8A16"}}]
GPTQ = [{"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}}]
# As Whisper's own: ids of languages, tasks and of the mark of a transcript without times.
MULTILINGUAL = {
    "lang_to_id": {"<|en|>": 200, "<|de|>": 201, "<|fr|>": 202},
    "task_to_id": {"transcribe": 210, "translate": 211},
    "no_timestamps_token_id": 220,
    "is_multilingual": True,
}


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sounds(tmp_path_factory.mktemp("sounds"), 10)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BY_NAME["whisper"].write(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture
def said(whisper: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the checkpoint whose generation_config.json says something more."""

    def make(**settings: Any) -> Path:
        path = shutil.copytree(whisper, tmp_path / f"model-{len(list(tmp_path.iterdir()))}")
        file = path / "generation_config.json"
        # A file that transformers takes for its own guess is not read by its generate.
        before = {key: value for key, value in json.loads(file.read_text()).items() if key != "_from_model_config"}
        file.write_text(json.dumps(before | settings))
        return path

    return make


def recipe(model: Path, stages: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    return {"name": "test", "model": str(model), "stages": stages, **sections}


def theirs(path: Path) -> Any:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(path).eval()


def features(model: SpeechModel, sounds: Path, count: int = 4) -> torch.Tensor:
    assert model.listener is not None
    return torch.stack([model.listener.file(sounds / f"s{i}.wav") for i in range(count)])


# ------------------------------------------------------------------ generation
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"suppress_tokens": [17, 18, 19, 20], "begin_suppress_tokens": list(range(60, 120))}, {}),
        ({"forced_decoder_ids": [[1, 31], [2, 77]]}, {}),
        (MULTILINGUAL, {}),
        (MULTILINGUAL | {"forced_decoder_ids": [[1, None], [2, 210]]}, {}),
        (MULTILINGUAL, {"language": "de"}),
        (MULTILINGUAL, {"language": "French", "task": "translate"}),
        (MULTILINGUAL | {"forced_decoder_ids": [[1, 202], [2, 211]]}, {"task": "transcribe"}),
        (MULTILINGUAL | {"language": "en", "task": "translate"}, {}),
    ],
    ids=["bare", "suppressed", "forced", "heard", "heard, forced task", "german", "to English", "task", "said"],
)
def test_greedy_outputs_are_those_of_transformers(
    said: Callable[..., Path], sounds: Path, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    path = said(**settings)
    model, reference = runtime.load(path), theirs(path)
    heard = features(model, sounds)
    model.tokenizer = None  # tokens in the place of texts
    for sound, ours in zip(heard, model.generate(heard, max_new_tokens=8, **options), strict=True):
        expected = reference.generate(sound[None], max_new_tokens=8, **options)[0].tolist()
        assert ours == expected[-len(ours) :], "without what it begins with"
        assert len(ours) == 8 or ours[-1] == 256
        assert not set(ours) & set(settings.get("suppress_tokens", ()))
        assert ours[0] not in settings.get("begin_suppress_tokens", ())


def test_every_kind_of_source_is_heard_alike(whisper: Path, sounds: Path) -> None:
    model = runtime.load(whisper)
    assert isinstance(model, SpeechModel)
    file = sounds / "s1.wav"
    wave, rate = audio.read_wav(file)
    assert rate == RATE
    mel = features(model, sounds, 2)[1]
    text = model.generate(str(file), max_new_tokens=5)
    assert isinstance(text, str)
    for source in (file, wave, wave.numpy(), wave.tolist(), mel):
        assert model.generate(source, max_new_tokens=5) == text
    others = model.generate([file, sounds / "s2.wav", wave, mel], max_new_tokens=5)
    assert others[0] == others[2] == others[3] == text
    assert model.generate(mel[None], max_new_tokens=5) == [text]
    assert model.stats["prompt_tokens"] == 20, "positions of the encoder"


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = torch.linspace(-0.5, 0.5, 100), torch.full((100,), 0.25)
    path = write_wav(tmp_path / "two.wav", torch.stack([left, right], dim=1), channels=2)
    samples, rate = audio.read_wav(path)
    assert rate == RATE
    assert torch.allclose(samples, (left + right) / 2, atol=1e-4)


def test_sounds_of_other_lengths_are_heard_one_beside_the_other(tmp_path: Path, sounds: Path) -> None:
    """Where a family pads to no window, each length is a batch of its own."""
    model = runtime.load(BY_NAME["speech_to_text"].write(tmp_path / "model"))
    files = [sounds / f"s{i}.wav" for i in range(4)]
    assert len({model.listener.file(file).shape for file in files}) > 1
    assert model.generate(files, max_new_tokens=5) == [model.generate(file, max_new_tokens=5) for file in files]


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (torch.zeros(RATE + 1), {}, "1.0 s long and the model hears 1 s at once"),
        (torch.full((100,), torch.nan), {}, "finite"),
        (torch.zeros(0), {}, "must have samples"),
        (torch.zeros(8, 39), {}, "features of shape [8, 40]"),
        (torch.zeros(100, dtype=torch.int64), {}, "must be floats"),
        ([], {}, "not an empty list"),
        (None, {}, "not a NoneType"),
        ("nowhere.wav", {}, "'nowhere.wav' cannot be read: No such file"),
        (torch.zeros(100), {"language": "en"}, "says no languages"),
        (torch.zeros(100), {"task": "translate"}, "says no tasks"),
        (torch.zeros(100), {"cache_memory": "1GB"}, "an encoder-decoder has none"),
        (torch.zeros(100), {"max_new_tokens": 40}, "exceed the model's context of 40"),
    ],
)
def test_a_wrong_source_gets_a_sentence(whisper: Path, source: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        runtime.load(whisper).generate(source, **options)
    assert sentence in str(caught.value)


def test_an_unknown_language_or_task_gets_a_sentence(said: Callable[..., Path]) -> None:
    model = runtime.load(said(**MULTILINGUAL))
    for options, sentence in (
        ({"language": "klingon"}, "it knows en, de, fr"),
        ({"task": "translat"}, "did you mean 'translate'?"),
        ({"language": 5}, "language must be a text"),
    ):
        with pytest.raises(RequestError, match=sentence.replace("?", r"\?")):
            model.generate(torch.zeros(100), **options)


def test_a_directory_without_an_extractor_still_takes_features(said: Callable[..., Path], sounds: Path) -> None:
    path = said()
    whole = runtime.load(path)
    (path / "preprocessor_config.json").unlink()
    model = runtime.load(path)
    mel = features(whole, sounds, 1)[0]
    assert model.generate(mel, max_new_tokens=4) == whole.generate(mel, max_new_tokens=4)
    with pytest.raises(RequestError, match="extractor"):
        model.generate(sounds / "s0.wav")
    with pytest.raises(RequestError, match="8 mel bins"):
        model.generate(torch.zeros(9, 40))
    with pytest.raises(RequestError, match="42"):
        model.generate(torch.zeros(8, 42))


# ------------------------------------------------------------------ the pipeline
def test_rows_keep_sounds_to_the_bit() -> None:
    values = torch.tensor([[1.5, -0.0, float("inf")], [1e-40, -3.25, 2**-126]])
    row = speech_rows.pack(values, (7, 8), (9, 10, 11))
    other = speech_rows.pack(values * 2, (7,), (5,))
    rows = speech_rows.together([row, other])
    assert speech_rows.features(rows)[0].view(torch.int32).equal(values.view(torch.int32))
    assert speech_rows.transcript(rows).tolist() == [[7, 8, 9, 10, 11], [7, 5, -1, -1, -1]]
    assert speech_rows.scored(rows).tolist() == [[-1, -1, 9, 10, 11], [-1, 5, -1, -1, -1]]


def test_batches_are_sounds_with_transcripts_of_equal_length(said: Callable[..., Path], sounds: Path) -> None:
    """Target: the start token, what the checkpoint puts first, the transcript, the end."""
    model = said(forced_decoder_ids=[[1, 31], [2, 77]])
    calibration = {"data": str(sounds), "samples": 7, "batch_size": 3, "seed": 4}
    session = opened(recipe(model, GPTQ, calibration=calibration))
    assert sum(len(rows) for rows, _ in session.batches) == 7
    assert {mask for _, mask in session.batches} == {None}
    lengths = [speech_rows.transcript(rows).shape[1] for rows, _ in session.batches]
    assert set(lengths) == {2 + len(" tone 0 here") + 1, 2 + len(" tone 1 here.") + 1}
    written = session.tokenizer.batch_decode([session.streamed.rows.target(rows)[0, 3:] for rows, _ in session.batches])
    assert all(text.startswith(" tone ") and text.endswith("<eos>") for text in written)
    for rows, _ in session.batches:
        assert (session.streamed.rows.target(rows)[:, :3] == torch.tensor([256, 31, 77])).all()
        number = int(session.tokenizer.decode(session.streamed.rows.target(rows)[0, 3:]).split()[1])
        assert session.streamed.rows.source(rows)[0].equal(features(runtime.load(model), sounds, 10)[number])


def opened(data: dict[str, Any]) -> Context:
    return Session.open(load_recipe(data)).context


def test_a_part_of_the_sounds_is_held_out(whisper: Path, sounds: Path) -> None:
    context = opened(recipe(whisper, GPTQ, calibration={"data": str(sounds)}, evaluate={}))
    apart, text = context.evaluation, context.calibration
    assert apart is not None
    assert (text.rows, apart.rows, apart.kind) == (7, 3, "held out"), "three of ten"
    assert apart.description == "the held-out part of " + sounds.name + ", 3 sounds"
    heard = {tuple(row.tolist()) for rows, _ in text.batches for row in rows}
    assert not any(tuple(row[row != speech_rows.NOTHING].tolist()) in heard for row in apart.ids)
    named = opened(recipe(whisper, GPTQ, calibration={"data": str(sounds)}, evaluate={"data": str(sounds)}))
    assert named.evaluation is not None
    assert (named.calibration.rows, named.evaluation.rows, named.evaluation.kind) == (10, 10, "named")


def test_one_sound_cannot_be_shared(whisper: Path, tmp_path: Path) -> None:
    request = recipe(whisper, GPTQ, calibration={"data": str(write_sounds(tmp_path / "one", 1))}, evaluate={})
    with pytest.raises(
        RequestError, match=r"calibration\.data: .*one' has only one sound, and evaluation needs a second"
    ):
        compress.plan(request)
    several = [{"data": "a"}, {"data": "b"}]
    with pytest.raises(
        RequestError, match=r"calibration\.data: 2 sets are mixed, but this kind of model takes only one"
    ):
        compress.plan(recipe(whisper, GPTQ, calibration={"data": several}))


@pytest.mark.slow
def test_calibration_on_sounds_is_better_than_none(whisper: Path, sounds: Path, tmp_path: Path) -> None:
    """And what `evaluate` says is what transformers' own model computes, token by token."""
    stages = [{"quantize": {"method": "gptq", "bits": 3, "group_size": 32}}]
    data = {"data": str(sounds), "batch_size": 4}
    judged = {**data, **UNLIMITED}
    fitted = compress.apply(
        recipe(whisper, stages, calibration=data, evaluate=judged), output=tmp_path / "gptq", quiet=True
    )
    stages = [{"quantize": {"method": "rtn", "bits": 3, "group_size": 32}}]
    rounded = compress.apply(recipe(whisper, stages, evaluate=judged), output=tmp_path / "rtn", quiet=True)
    assert 0 < fitted.metrics["kl"] < 0.7 * rounded.metrics["kl"]
    assert fitted.metrics["before"]["perplexity"] == pytest.approx(perplexity(whisper, sounds), rel=1e-4)
    assert rounded.metrics["before"] == fitted.metrics["before"]
    assert fitted.metrics["after"]["perplexity"] == pytest.approx(perplexity(fitted.path, sounds), rel=1e-4)


@torch.inference_mode()
def perplexity(path: Path, sounds: Path) -> float:
    model, whole = runtime.load(path, kernels="reference"), theirs(path)
    losses = []
    for number in range(10):
        ids = model.tokenizer((sounds / f"s{number}.txt").read_text().rstrip("\n"))["input_ids"] + [256]
        mel = model.listener.file(sounds / f"s{number}.wav")[None]
        logits = whole(input_features=mel, decoder_input_ids=torch.tensor([[256, *ids[:-1]]])).logits[0]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="none").tolist()
    return float(torch.tensor(losses).mean().exp())


def test_methods_without_data_need_no_sounds(whisper: Path, tmp_path: Path) -> None:
    artifact = compress.apply(recipe(whisper, RTN), output=tmp_path / "out", quiet=True)
    assert artifact.manifest.get("calibration") is None
    assert (artifact.path / "preprocessor_config.json").is_file()


@pytest.mark.slow
def test_a_resumed_run_gives_the_same_bytes(whisper: Path, sounds: Path, tmp_path: Path, monkeypatch: Any) -> None:
    given = recipe(whisper, GPTQ, calibration={"data": str(sounds), "batch_size": 3})
    whole = compress.apply(given, output=tmp_path / "whole", quiet=True)
    from compress.model.streamed import StreamedModel

    real, calls = StreamedModel.advance, []

    def stop(self: StreamedModel, index: int, *arguments: Any) -> torch.Tensor:
        calls.append(index)
        if index == 3:
            raise KeyboardInterrupt
        return real(self, index, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(StreamedModel, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            compress.apply(given, output=tmp_path / "cut", quiet=True)
    resumed = compress.apply(given, output=tmp_path / "cut", quiet=True, resume=True)
    for file in whole.path.glob("*.safetensors"):
        assert file.read_bytes() == (resumed.path / file.name).read_bytes()


@pytest.mark.slow
def test_half_precision_runs_as_it_is_stored(whisper: Path, sounds: Path, tmp_path: Path) -> None:
    model = shutil.copytree(whisper, tmp_path / "model")
    tensors = {name: value.bfloat16() for name, value in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    given = recipe(model, GPTQ, calibration={"data": str(sounds), "batch_size": 4, "samples": 4})
    artifact = compress.apply(given, output=tmp_path / "out", quiet=True)
    loaded = runtime.load(artifact.path)
    assert loaded.engine.module.dtype == torch.bfloat16
    assert isinstance(loaded.generate(sounds / "s0.wav", max_new_tokens=4), str)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: None, None),
        (lambda f: (f / "s0.txt").unlink(), "s0.txt' cannot be read"),
        (lambda f: (f / "s0.txt").write_text("  \n"), "s0.txt' holds no text"),
        (lambda f: (f / "s0.txt").write_bytes(b"\xff\xff"), "is not UTF-8 text"),
        (lambda f: (f / "s0.txt").write_text("x" * 50), "has 52 tokens, and the model writes 40 at most"),
        (lambda f: (f / "s0.wav").write_bytes(b"RIFF"), "is no .wav file of 16-bit PCM"),
        (lambda f: write_wav(f / "s0.wav", torch.zeros(0)), "holds no sound"),
        (
            lambda f: write_wav(f / "s0.wav", torch.zeros(100), rate=8000),
            "8000 samples a second and the model reads 16000",
        ),
        (lambda f: write_wav(f / "s0.wav", torch.zeros(2 * RATE)), "2.0 s long and the model hears 1 s at once"),
        (lambda f: [file.unlink() for file in f.glob("*.wav")], "has no .wav files"),
        (lambda f: shutil.rmtree(f), "is no directory, and the model hears"),
    ],
)
def test_wrong_sounds_get_a_sentence(
    whisper: Path, tmp_path: Path, change: Callable[[Path], Any], sentence: str | None
) -> None:
    folder = write_sounds(tmp_path / "sounds", 3)
    change(folder)
    given = recipe(whisper, GPTQ, calibration={"data": str(folder), "samples": 3})
    if sentence is None:
        assert compress.plan(given) is not None
        return
    with pytest.raises(RequestError) as caught:
        compress.plan(given)
    assert sentence in str(caught.value)
    assert "calibration.data" in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({}, "calibration.data: the model reads speech, and none is bundled; give a directory of .wav files"),
        ({"calibration": {"data": "text.txt"}}, "'text.txt' is no directory, and the model hears"),
        ({"calibration": {"data": "SOUNDS", "sequence_length": 5}}, "raise it, or cut the sound"),
        (
            {"stages": RTN, "evaluate": {"data": "bundled"}},
            "evaluate.data: the model reads speech, and none is bundled",
        ),
        ({"stages": [{"recover": {"method": "finetune"}}]}, "only prune and quantize stages support such models"),
        ({"stages": [{"kv_cache": {"keys": "int4"}}]}, "only prune and quantize stages support such models"),
        ({"stages": [{"quantize": {"method": "rtn", "scheme": "W8A16", "targets": ["lm_head"]}}]}, "shares its weight"),
    ],
)
def test_what_is_made_for_text_gets_a_sentence(
    whisper: Path, sounds: Path, sections: dict[str, Any], sentence: str
) -> None:
    written = json.loads(json.dumps(sections).replace("SOUNDS", str(sounds)))
    with pytest.raises(RequestError) as caught:
        compress.plan(recipe(whisper, GPTQ) | written)
    assert sentence in str(caught.value)


def test_the_language_of_transcripts_is_asked_for(said: Callable[..., Path], sounds: Path) -> None:
    model = said(**MULTILINGUAL)
    given = recipe(model, GPTQ, calibration={"data": str(sounds), "samples": 2})
    with pytest.raises(RequestError, match=r"calibration\.language: "):
        compress.plan(given)
    given["calibration"]["language"] = "klingon"
    with pytest.raises(RequestError, match=r"calibration\.language: .*'klingon'"):
        compress.plan(given)
    given["calibration"]["language"] = "de"
    session = opened(given)
    assert session.streamed.rows.target(session.batches[0][0])[0, :4].tolist() == [256, 201, 210, 220]
    assert session.streamed.rows.labels(session.batches[0][0])[0, :3].tolist() == [-1, -1, -1]


def test_a_language_is_nothing_for_models_that_read(tmp_path: Path) -> None:
    text = BY_NAME["t5"].write(tmp_path / "t5")
    with pytest.raises(RequestError, match=r"evaluate\.language: T5ForConditionalGeneration"):
        compress.plan(recipe(text, RTN, evaluate={"language": "en"}))


def test_an_encoder_that_reads_waveforms_gets_a_sentence(tmp_path: Path) -> None:
    from transformers import MoonshineConfig

    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    MoonshineConfig(**sizes, architectures=["MoonshineForConditionalGeneration"]).save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(runtime.ArtifactError, match="input_values"):
        runtime.load(tmp_path)
