"""Vision-language models: what they are calibrated and evaluated on, against transformers' own forward on the same images."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import UNLIMITED
from vision_models import picture, write_rows, write_vision_model

import compress
import runtime
from compress.data import vision
from compress.data.images import load_processor
from compress.data.vision import _samples
from compress.model.context import Context
from compress.model.hidden_states import HiddenStates
from compress.model.streamed import run_blocks
from compress.recipe import load as load_recipe
from compress.run.record import sample_prompts
from compress.run.session import Session
from runtime.errors import RequestError

GPTQ = [{"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}}]
NAMES = ["qwen2_5_vl", "qwen3_vl", "llava"]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


def recipe(model: Path, data: Path | str, stages: Any = GPTQ, **more: Any) -> dict[str, Any]:
    calibration = {"data": str(data), "sequence_length": 96, "batch_size": 3} | more.pop("calibration", {})
    return {"name": "test", "model": str(model), "calibration": calibration, "stages": stages, **more}


def opened(given: dict[str, Any]) -> Context:
    return Session.open(load_recipe(given)).context


def theirs(path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path).eval()


@torch.inference_mode()
def test_blocks_see_what_transformers_computes(model: Path, rows: Path) -> None:
    """Hidden states that enter and leave every block, and logits, are those of a plain forward of each row alone with its images."""
    context, plain = opened(recipe(model, rows)), theirs(model)
    batches = context.batches
    assert sum(len(ids) for ids, _ in batches) == 8
    assert any(mask is not None for _, mask in batches), "rows of a batch have other lengths"
    seen: dict[tuple[int, int], torch.Tensor] = {}
    states = HiddenStates(len(batches))
    with context.streamed.outside():
        context.streamed.prelude(batches, states)
        entering = [states.get(number).clone() for number in range(len(batches))]
        final = run_blocks(
            context.streamed, batches, None, on_state=lambda i, n, s: seen.__setitem__((i, n), s.clone())
        )
        images = 0
        for number, (ids, mask) in enumerate(batches):
            logits = context.streamed.outputs(final.get(number), ids)
            for row in range(len(ids)):
                length = len(ids[row]) if mask is None else int(mask[row].sum())
                alone = context.streamed.rows.inputs(ids[row : row + 1, :length])
                images += "pixel_values" in alone
                expected = plain(**alone, output_hidden_states=True)
                assert torch.allclose(entering[number][row, :length], expected.hidden_states[0][0], atol=1e-5)
                assert torch.allclose(seen[0, number][row, :length], expected.hidden_states[1][0], atol=1e-4)
                assert torch.allclose(logits[row, :length], expected.logits[0], atol=1e-4)
    assert images == 7
    assert bool(context.streamed._added) == (context.streamed.config.model_type == "qwen3_vl"), "between its blocks"


@torch.inference_mode()
def test_positions_are_those_of_images(qwen: Path, rows: Path) -> None:
    """Rows of equal shapes whose images stand elsewhere, or are as large the other way round, are called with positions of their own."""
    context = opened(recipe(qwen, rows))
    layout, processor = context.streamed.rows, load_processor(qwen, context.streamed.config)
    mark = "<|image_pad|>"

    def row(text: str, width: int, height: int) -> torch.Tensor:
        found = processor(text=[text], images=[picture(1, width, height)], return_tensors="pt")
        return layout.pack(lambda: found)

    made = [
        row(f"ab{mark}cd", 24, 16),
        row(f"abc{mark}d", 24, 16),
        row(f"ab{mark}cd", 16, 24),
        row(f"xy{mark}zz", 24, 16),
    ]
    assert len({len(one) for one in made}) == 1
    found = [context.streamed.block_kwargs((one[None], None))["position_embeddings"][0] for one in made]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert found[0] is found[3], "what is equal is kept once"
    text = context.streamed.block_kwargs((torch.arange(len(made[0]))[None], None))["position_embeddings"][0]
    assert not torch.equal(text, found[0])


@pytest.mark.slow
def test_from_images_to_an_artifact(model: Path, rows: Path, tmp_path: Path) -> None:
    """Calibrated and evaluated on images; text and image prompts run on the artifact; towers are those of the source."""
    given = recipe(model, rows, evaluate={**UNLIMITED, "sequence_length": 96, "batch_size": 2})
    artifact = compress.apply(given, output=tmp_path / "out", quiet=True)
    assert "rows of images with text" in artifact.manifest["calibration"]["description"]
    assert 0 < artifact.metrics["kl"] < 0.5
    loaded = runtime.load(artifact.path)
    assert isinstance(loaded.generate("hello", max_new_tokens=3), str)
    with pytest.raises(RequestError, match="AutoModelForImageTextToText"):
        loaded.generate("hello", images=[picture(1)])
    for name, entry in artifact.manifest["tensors"].items():
        tower = any(part in name for part in ("visual", "vision", "projector"))
        assert not tower or entry["action"] == "copied", name
    processor = load_processor(artifact.path, loaded.engine.module.config)
    context = opened(given)
    windows = context.windows
    assert windows is not None
    expected = _perplexity(theirs(artifact.path), context, windows)
    assert artifact.metrics["after"]["perplexity"] == pytest.approx(expected, rel=1e-3)
    text = processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], tokenize=False)
    asked = processor(text=[text], images=[picture(3)], return_tensors="pt")
    answer = theirs(artifact.path).generate(**asked, max_new_tokens=3, do_sample=False)
    assert answer.shape[1] == asked["input_ids"].shape[1] + 3


@torch.inference_mode()
def _perplexity(model: Any, context: Context, windows: torch.Tensor) -> float:
    """Of text tokens, row by row."""
    losses = []
    for ids in windows:
        row = ids[ids != -1][None]
        logits = model(**context.streamed.rows.inputs(row)).logits[0, :-1]
        labels = row[0, 1:].masked_fill(row[0, 1:] < 0, -100)
        losses.append(torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")[labels >= 0])
    return float(torch.cat(losses).mean().exp())


def test_rows_are_as_long_as_images_need(qwen: Path, rows: Path, tmp_path: Path) -> None:
    """Where the recipe leaves it open, whatever the size of the file that names them."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(4):
        picture(number, 32, 32).save(folder / f"p{number}.png")
        (folder / f"p{number}.txt").write_text("a picture " * 8)
    given = recipe(qwen, folder, evaluate={})
    given["calibration"] = {"data": str(folder)}
    context = opened(given)
    assert context.calibration.rows == 3
    assert context.evaluation is not None
    assert context.evaluation.rows == 1
    assert context.recipe.calibration.sequence_length == 128, "positions of the model"


@pytest.mark.slow
def test_statistics_are_not_those_of_text(qwen: Path, rows: Path, tmp_path: Path) -> None:
    """The same text with and without its images gives other weights; text alone is warned of."""
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": json.loads(line).get("text", "x" * 90)}) + "\n" for line in rows.open())
    )
    with_images, without = recipe(qwen, rows), recipe(qwen, text, calibration={"packing": False})
    assert not any("calibrated on text alone" in warning for warning in compress.plan(with_images).warnings)
    assert any("calibrated on text alone" in warning for warning in compress.plan(without).warnings)
    made = [compress.apply(one, output=tmp_path / str(n), quiet=True) for n, one in enumerate((with_images, without))]
    packed = [{file.name: file.read_bytes() for file in one.path.glob("*.safetensors")} for one in made]
    assert packed[0].keys() == packed[1].keys()
    assert packed[0] != packed[1]
    again = compress.apply(with_images, output=tmp_path / "again", quiet=True)
    assert {file.name: file.read_bytes() for file in again.path.glob("*.safetensors")} == packed[0]


def test_every_kind_of_set_gives_the_same_rows(qwen: Path, tmp_path: Path) -> None:
    """A .jsonl file with paths, a Parquet file with bytes as `datasets` stores them, and a directory."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "pictures"
    folder.mkdir()
    entries, stored = [], []
    for number in range(3):
        picture(number).save(folder / f"p{number}.png")
        (folder / f"p{number}.txt").write_text(f"picture {number}\n")
        entries.append({"image": f"pictures/p{number}.png", "text": f"picture {number}"})
        stored.append({"bytes": (folder / f"p{number}.png").read_bytes(), "path": None})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, entries)))
    columns = {"images": [[image] for image in stored], "text": [entry["text"] for entry in entries]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    sets = [tmp_path / "rows.jsonl", tmp_path / "rows.parquet", folder]
    found = [opened(recipe(qwen, data)).calibration.sha256 for data in sets]
    assert found[0] == found[1] == found[2]
    picture(7).save(folder / "p1.png")
    assert opened(recipe(qwen, folder)).calibration.sha256 != found[0], "the images count, not their names"


def test_rows_of_one_image_are_on_one_side(qwen: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about an image that is calibrated on are held out from no evaluation; of what is, no more is scored than of text."""
    entries: list[dict[str, Any]] = [
        {"image": f"p{number % 4}.png", "text": f"question {number}"} for number in range(16)
    ]
    part = {"type": "image", "image": str(rows.parent / "p0.png")}
    entries.append({"image": "p5.png", "messages": [{"role": "user", "content": [part, {"type": "image"}]}]})
    file = rows.with_name("questions.jsonl")
    file.write_text("\n".join(map(json.dumps, entries)))
    named = load_recipe(recipe(qwen, file)).calibration.text
    images = [{key for sample in _samples(named, True, apart)[0] for key in sample.keys} for apart in (False, True)]
    assert all(images)
    assert not images[0] & images[1]
    given = recipe(qwen, file, evaluate={"sequence_length": 96})
    whole = opened(given).evaluation
    monkeypatch.setattr(vision, "TOKENS", 40)
    cut = opened(given).evaluation
    assert whole is not None
    assert cut is not None
    assert cut.tokens - len(cut.ids[-1]) < 40 <= cut.tokens < whole.tokens
    file.write_text("\n".join(json.dumps({"image": "p1.png", "text": str(number)}) for number in range(5)))
    with pytest.raises(RequestError, match="no two rows without a common image"):
        compress.plan(given)


def test_a_set_of_which_no_row_is_drawn(qwen: Path, rows: Path) -> None:
    sets = [{"data": str(rows), "weight": 100}, {"data": str(rows), "weight": 1}]
    given = recipe(qwen, rows)
    given["calibration"] |= {"data": sets, "samples": 4}
    with pytest.raises(RequestError, match="gives none of 4 rows"):
        compress.plan(given)


def test_images_are_no_prompts(qwen: Path, tmp_path: Path) -> None:
    """Samples continue rows of text alone; where there are none, there are no samples."""
    picture(1).save(tmp_path / "p.png")
    shown = {"image": "p.png", "text": "<|image_pad|> is what is to be seen here"}
    for text, prompts in (("A row without an image.", ["A row without an image."[:23]]), (None, [])):
        entries = [shown] if text is None else [shown, {"text": text + " And more of it."}]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, entries)))
        found = sample_prompts(
            opened(recipe(qwen, "bundled", evaluate={"data": str(tmp_path / "rows.jsonl"), "sequence_length": 96}))
        )
        assert [prompt[:23] for prompt in found] == prompts


def _bomb() -> bytes:
    """A PNG that says it has 60,000 x 60,000 pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def _png(width: int = 24, height: int = 16) -> bytes:
    file = io.BytesIO()
    picture(1, width, height).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "row", "sentence"),
    [
        (_png()[:200], {}, "p.png' cannot be read as an image"),
        (b"not an image", {}, "p.png' cannot be read as an image"),
        (b"", {}, "p.png' cannot be read as an image"),
        (_bomb(), {}, "pixels"),
        (_png(900, 2), {}, "aspect ratio"),
        (None, {}, "p.png' is not a file"),
        (_png(), {"image": "../pictures/p.png"}, None),
        (_png(), {"image": "https://example.com/p.png"}, "only local files are read"),
        (_png(), {"image": 5}, "expected the path or the bytes of an image"),
        (_png(), {"text": "<|image_pad|> <|image_pad|>"}, "has 1 images but 2 placeholders"),
        (_png(), {"text": None}, "where a text, or a list of messages, is expected"),
        (_png(), {"text": "x" * 200}, None),
        (_png(80, 80), {"text": "x" * 90 + "<|image_pad|>"}, "tokens including those of its images"),
        (_png(), {"messages": 5}, "where a text, or a list of messages, is expected"),
        (_png(), {"messages": [{"role": "user"}]}, "the content of a message of role"),
        (
            _png(),
            {"messages": [{"role": "user", "content": [{"type": "image"}] * 2}]},
            "more image parts than images (1)",
        ),
        (_png(), {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "a part of a message must be text"),
        (_png(), {"messages": [{"role": "user", "content": "what?"}]}, None),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(
    qwen: Path, tmp_path: Path, content: bytes | None, row: dict[str, Any], sentence: str | None
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    if content is not None:
        (folder / "p.png").write_bytes(content)
    (folder / "rows.jsonl").write_text(
        json.dumps({"image": "p.png", **({} if "messages" in row else {"text": "a picture"}), **row})
    )
    given = recipe(qwen, folder / "rows.jsonl")
    if sentence is None:
        compress.plan(given)
        return
    with pytest.raises(RequestError) as caught:
        compress.plan(given)
    assert sentence in str(caught.value)
    assert "calibration." in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "stages", "sentence"),
    [
        (lambda m: (m / "preprocessor_config.json").unlink(), GPTQ, "has no processor (preprocessor_config.json)"),
        (lambda m: (m / "preprocessor_config.json").write_text("{"), GPTQ, "processor in .* cannot be read"),
        (lambda m: None, [{"kv_cache": {"keys": "int4"}}], "only prune and quantize stages support such data"),
        (
            lambda m: None,
            [{"structure": {"method": "block_influence", "remove": "layers", "ratio": 0.5}}],
            "only prune and quantize stages support such data",
        ),
    ],
)
def test_what_images_do_not_go_with(
    tmp_path: Path, rows: Path, change: Callable[[Path], Any], stages: Any, sentence: str
) -> None:
    model = write_vision_model("qwen2_5_vl", tmp_path / "model")
    change(model)
    with pytest.raises(runtime.errors.CompressError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        compress.plan(recipe(model, rows, stages))


def test_without_pillow_the_extra_is_named(qwen: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(RequestError, match="images need Pillow, which is not installed: "):
        compress.plan(recipe(qwen, rows))
