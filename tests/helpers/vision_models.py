"""Tiny random vision-language checkpoints with processors, and images with text to calibrate them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import byte_tokenizer
from family_models import FAMILIES
from PIL import Image

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{% if part.type == 'image' %}"
    "MARK{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
)
_MARKED = "<|vision_start|><|image_pad|><|vision_end|>"
MARKS = {"qwen2_5_vl": _MARKED, "qwen3_vl": _MARKED, "llava": "<image>"}
_QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_TOKENS = {"qwen2_5_vl": _QWEN, "qwen3_vl": _QWEN, "llava": ["<image>"]}
# As published: the class that transformers names where torchvision is installed; without it the one that needs Pillow alone is taken.
_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024}, "processor_class": "Qwen2_5_VLProcessor",
    },
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024}, "processor_class": "Qwen3VLProcessor",
    },
    "llava": {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16},
        "processor_class": "LlavaProcessor",
    },
}  # fmt: skip


def write_vision_model(name: str, path: Path) -> Path:
    """A checkpoint of the family `name`, whose tokens of images are behind those of bytes."""
    next(family for family in FAMILIES if family.name == name).write(path)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": _TOKENS[name]})
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(_PROCESSORS[name]))
    if name == "llava":
        more = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        (path / "processor_config.json").write_text(json.dumps(more | {"processor_class": "LlavaProcessor"}))
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", MARKS[name]))
    return path


def picture(number: int, width: int = 24, height: int = 16) -> Image.Image:
    """A coloured one of its own."""
    values = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values // (1 + number % 3))


def write_rows(folder: Path, count: int = 6) -> Path:
    """A .jsonl file of images of two sizes with text, and one row of each kind that is read."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        picture(number, 16 + 8 * (number % 2)).save(folder / f"p{number}.png")
        rows.append({"image": f"p{number}.png", "text": f"This is picture number {number}{'!' * (number % 3)}"})
    part = {"type": "image", "image": "p0.png"}
    question = [part, {"type": "text", "text": " or "}, {"type": "image"}, {"type": "text", "text": "?"}]
    told = [{"role": "user", "content": question}, {"role": "assistant", "content": "The first."}]
    rows.append({"messages": told, "images": ["p1.png"]})
    rows.append({"text": "A row without an image."})
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file
