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
"""Pixels of an image at most: a file of a few kilobytes can hold one that fills the memory."""

_FILES = ("processor_config.json", "preprocessor_config.json")


def load_processor(path: Path, config: Any) -> Any:
    """transformers' processor of a checkpoint: text and images to what the model reads; None where the directory has none.

    Without torchvision, which transformers wants for videos alone where images are concerned, it is one that reads no videos.

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
    """An image (Pillow's, RGB) of a path, relative to `folder`, of `{"bytes", "path"}` as `datasets` stores it, or of Pillow's own.

    Paths may lead out of the folder: who names a file of rows trusts it as far as which images are read.

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
            raise RequestError(f"'{content[:80]}' is an address, and only files are read: download it")
        file = (folder or Path()) / content
        name = f"'{file}'"
        if not file.is_file():
            raise RequestError(f"{name} is no file")
        content = file
    elif isinstance(content, bytes):
        content = io.BytesIO(content)
    elif not isinstance(content, image_module.Image):
        raise RequestError(f"it is {type(content).__name__}, and the path or the bytes of an image are expected")
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
