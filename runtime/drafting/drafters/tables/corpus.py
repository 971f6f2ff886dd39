"""Token ids of a corpus, given as they are or as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from runtime.drafting.drafters.tables.history import BORDER
from runtime.errors import RequestError


def token_ids(source: str | Path | Sequence[int], where: str, most: int) -> list[int]:
    """The ids, in order.

    Args:
        source: ids, or the path of a `.npy` file with one row of integers.
        where: says in errors whose corpus it is.
        most: ids that are allowed.

    Raises:
        RequestError: the file cannot be read, or these are not at most `most` token ids.
    """
    name = repr(str(source)) if isinstance(source, (str, Path)) else "what is given"
    try:
        found = (
            np.load(source, mmap_mode="r", allow_pickle=False) if isinstance(source, (str, Path)) else np.array(source)
        )
    except (OSError, ValueError, OverflowError) as error:
        raise RequestError(f"{where}: {name} cannot be read as a .npy file of token ids: {error}") from None
    if not isinstance(found, np.ndarray) or found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise RequestError(f"{where} must be one row of token ids, which {name} is not")
    if len(found) > most:
        raise RequestError(f"{where} may have at most {most} token ids, but {name} has {len(found)}")
    if len(found) and not (int(found.min()) >= 0 and int(found.max()) < BORDER):
        raise RequestError(
            f"{where} must be token ids, at least 0 and below {BORDER}, which {name} does not hold throughout"
        )
    return [int(token) for token in found]
