"""Who may read what is written."""

from __future__ import annotations

import os
from pathlib import Path


def let_others_read(path: Path) -> None:
    """A file that was made for its owner only (safetensors does) gets the rights that new files have here."""
    mask = os.umask(0o077)
    os.umask(mask)
    if not path.stat().st_mode & 0o077:
        path.chmod(0o666 & ~mask)
