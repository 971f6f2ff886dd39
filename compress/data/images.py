"""Images for calibration and evaluation of vision-language models, and the processor by which the checkpoint reads them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import ArtifactError, RequestError, first_line
from runtime.system.distribution import how_to_install

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MOST_PIXELS = 100_000_000
"""Largest number of pixels of an image: a file of a few kilobytes can decode to one that fills the memory."""

_FILES = ("processor_config.json", "preprocessor_config.json")


def load_processor(path: Path, config: Any) -> Any:
    """transformers' processor of a checkpoint, which makes model inputs of text and images; None if the directory has none.

    Without torchvision, which transformers requires for videos, the processor reads images only.

    Raises:
        RequestError: Pillow is not installed. ArtifactError: the directory's files cannot be read.
    """
    if not any((path / name).is_file() for name in _FILES):
        return None
    _pillow()
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.utils import is_torchvision_available

    kind: Any = transformers.AutoProcessor
    own: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(config.model_type) or "", None)
    if own is not None and not is_torchvision_available():
        names = [name for name in own.get_attributes() if name != "video_processor"]
        kind = type(own.__name__, (own,), {"get_attributes": classmethod(lambda _: names)})
    try:
        processor = kind.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # transformers raises whatever comes up, bare Exception and ImportError included
        raise ArtifactError(f"the processor in {path} cannot be read: {first_line(error)}") from error
    return processor if hasattr(processor, "image_processor") else None


def open_image(value: Any, folder: Path | None) -> Any:
    """An RGB Pillow image from a path relative to `folder`, from `{"bytes", "path"}` as `datasets` stores it, or from a Pillow image.

    Paths may lead out of the folder: a user who names a data file trusts it to choose which images are read.

    Raises:
        RequestError: no readable file, no image, one that is cut short, or one that is too large.
    """
    image_module = _pillow()
    name = "it"
    content: Any = value
    if isinstance(value, Mapping):
        content = value.get("bytes") or value.get("path")
    if isinstance(content, str):
        if "://" in content or content.startswith("data:"):
            raise RequestError(f"'{content[:80]}' is a URL, and only local files are read: download it")
        file = (folder or Path()) / content
        name = f"'{file}'"
        if not file.is_file():
            raise RequestError(f"{name} is not a file")
        content = file
    elif isinstance(content, bytes):
        content = io.BytesIO(content)
    elif not isinstance(content, image_module.Image):
        raise RequestError(f"it is {type(content).__name__}; expected the path or the bytes of an image")
    try:
        image = content if isinstance(content, image_module.Image) else image_module.open(content)
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise RequestError(f"{name} has {width} x {height} pixels; at most {MOST_PIXELS:,} are read")
        return image.convert("RGB")
    except RequestError:
        raise
    except (
        Exception
    ) as error:  # decoders of a hundred formats raise what they like (SyntaxError, struct.error, zlib.error)
        raise RequestError(f"{name} cannot be read as an image: {first_line(error)}") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise RequestError(f"images need Pillow, which is not installed: {how_to_install('vision')}") from None
    return Image
