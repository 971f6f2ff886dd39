"""Memory of one call's KV cache, and whether its requests fit in it."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.engines.base import Engine
from runtime.errors import RequestError
from runtime.system.memory import available_bytes

_DEFAULT = 2 * 10**9
_SHARE = 0.25  # of the memory that is free, for a call that says nothing
_MOST = 0.75  # of it, where a single prompt needs more than that


def pool_pages(engine: Engine, positions: Sequence[int], cache_memory: int | None, drafts: int = 0) -> int:
    """How many pages the pool of a call gets: what all requests together could use, as far as the memory bound allows.

    Args:
        positions: cache positions that each request takes at most.
        cache_memory: the user's bound in bytes; None: the engine's `cache_budget` where it has one, else the default of
            `GenerationOptions`.
        drafts: most drafted tokens of a text, which want places too, where memory allows; 0: none.

    Raises:
        RequestError: a request could never be finished within the bound, or a whole draft never has a place in it.
    """
    pages = [-(-count // engine.page_size) for count in positions]
    largest = max(pages)
    if cache_memory is None and engine.cache_budget is not None:
        bound = int(min(engine.cache_budget, _MOST * available_bytes(engine.device))) // engine.page_bytes
        left = _gigabytes(bound * engine.page_bytes)
        limit, fewer = f"max_memory leaves {left}: raise it, ", "ask for fewer max_new_tokens or set cache_memory"
    elif cache_memory is None:
        available = available_bytes(engine.device)
        bound = int(min(_DEFAULT, _SHARE * available)) // engine.page_bytes
        if largest > bound:
            bound = min(largest, int(_MOST * available) // engine.page_bytes)
        limit = f"{_gigabytes(bound * engine.page_bytes)} of the free memory can be used: "
        fewer = "ask for fewer max_new_tokens"
    else:
        bound = cache_memory // engine.page_bytes
        limit, fewer = f"cache_memory allows {_gigabytes(cache_memory)}: raise it or ", "ask for fewer max_new_tokens"
    if largest > bound:
        need = _gigabytes(largest * engine.page_bytes)
        raise RequestError(
            f"a prompt and its new tokens take {max(positions)} positions, {need} of KV cache; {limit}{fewer}"
        )
    if -(-drafts // engine.page_size) > bound:
        need = _gigabytes(-(-drafts // engine.page_size) * engine.page_bytes)
        raise RequestError(f"drafter: a tree of {drafts} tokens takes {need} of KV cache; {limit}draft fewer (nodes)")
    return min(bound, sum(pages) + (len(pages) if drafts else 0))


def cache_bound(engine: Engine, needs: Sequence[int], cache_memory: int | None) -> int:
    """Bytes that the caches of prompts decoded together may take, on engines that know what theirs need beforehand.

    Args:
        needs: bytes of each prompt's cache at its largest.
        cache_memory: as for `pool_pages`.

    Raises:
        RequestError: a prompt alone needs more.
    """
    most = int(_MOST * available_bytes(engine.device))
    if cache_memory is not None:
        bound, limit = cache_memory, f"cache_memory allows {_gigabytes(cache_memory)}: raise it"
    elif engine.cache_budget is not None:
        bound = min(engine.cache_budget, most)
        limit = f"max_memory leaves {_gigabytes(bound)}: raise it, set cache_memory"
    else:
        bound, limit = most, f"{_gigabytes(most)} of the free memory can be used"
    if max(needs) > bound:
        text = f"a prompt and its new tokens take {_gigabytes(max(needs))} of KV cache, the layer that is being compressed included"
        raise RequestError(f"{text}; {limit}, give a shorter prompt, or ask for fewer max_new_tokens")
    return bound


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
