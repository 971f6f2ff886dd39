"""Memory of the KV cache, and whether the requests of a call fit in it."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.engines.base import Engine
from runtime.errors import RequestError
from runtime.system.memory import available_bytes

_DEFAULT = 2 * 10**9
_SHARE = 0.25  # of the memory that is free on a CPU, for a call that says nothing
_MOST = 0.75  # of it, where a single prompt needs more than that
_GPU_SHARE = 0.85  # of what is free on a GPU, with the weights there: the rest is for a step's activations, graphs and workspaces


KEPT = 512 * 2**20
_KEPT_SHARE = 1 / 16  # of the memory that is free


def free_bytes(engine: Engine) -> int:
    """Memory for a new pool, in bytes: what is free on the engine's device, and what it has from an earlier pool."""
    return _least(engine, available_bytes(engine.device) + engine.spare_pages * engine.page_bytes)


def _least(engine: Engine, found: int) -> int:
    """A number that may differ from rank to rank, which must decide alike: the least of all."""
    return found if engine.ranks is None else engine.ranks.least(found)


def kept_bytes(engine: Engine) -> int:
    """Memory that the pages of ended calls may take where `runtime.load` was told nothing."""
    return int(min(KEPT, _KEPT_SHARE * free_bytes(engine)))


def pages_of(engine: Engine, positions: int) -> int:
    """Pages of a sequence of so many positions, and what it takes beside them."""
    return -(-positions // engine.page_size) + engine.overhead.sequence


def most_pages(engine: Engine, largest: int, cache_memory: int | None, drafts: int = 0) -> int:
    """How many pages a pool may have.

    Args:
        largest: pages that the largest request takes at most (`pages_of`).
        cache_memory: the user's bound in bytes; None: the engine's `cache_budget` where it has one, else the default of
            `GenerationOptions`.
        drafts: most drafted tokens of a text, which want places too, where memory allows; 0: none.

    Raises:
        RequestError: the request could never be finished within the bound, or a whole draft never has a place in it.
    """
    tree = -(-drafts // engine.page_size)
    largest += engine.overhead.step
    allowed, limit = _allowed(engine, cache_memory)
    bound = allowed // engine.page_bytes
    if cache_memory is None and engine.cache_budget is None:
        usual = allowed if _on_gpu(engine) else int(min(_DEFAULT, _SHARE * free_bytes(engine)))
        bound = min(bound, max(usual // engine.page_bytes, largest))
        spare = _least(engine, engine.spare_pages)
        if spare >= largest:  # with graphs captured over them: more pages are not worth capturing anew
            bound = spare
    if largest > bound:
        need = _gigabytes(largest * engine.page_bytes)
        raise RequestError(
            f"a prompt and its new tokens take {need} of KV cache; {limit}, or ask for fewer max_new_tokens"
        )
    if tree > bound:
        need = _gigabytes(tree * engine.page_bytes)
        raise RequestError(
            f"drafter: a tree of {drafts} tokens takes {need} of KV cache; {limit}, or draft fewer (nodes)"
        )
    return bound


def pool_pages(engine: Engine, positions: Sequence[int], cache_memory: int | None, drafts: int = 0) -> int:
    """How many pages a pool gets that is for one call alone: what its requests, of so many positions each, could use, as far as
    `most_pages` allows."""
    counts = [pages_of(engine, count) for count in positions]
    bound = most_pages(engine, max(counts), cache_memory, drafts)
    return min(bound, sum(counts) + bool(drafts) * len(counts) + engine.overhead.step)


def cache_bound(engine: Engine, needs: Sequence[int], cache_memory: int | None) -> int:
    """Bytes that the caches of prompts decoded together may take, on engines that know what theirs need beforehand.

    Args:
        needs: bytes of each prompt's cache at its largest.
        cache_memory: as for `most_pages`.

    Raises:
        RequestError: a prompt alone needs more.
    """
    bound, limit = _allowed(engine, cache_memory)
    if max(needs) > bound:
        text = f"a prompt and its new tokens take {_gigabytes(max(needs))} of KV cache, the layer that is being compressed included"
        raise RequestError(f"{text}; {limit}, give a shorter prompt, or ask for fewer max_new_tokens")
    return bound


def _allowed(engine: Engine, cache_memory: int | None) -> tuple[int, str]:
    """Bytes that the cache of a call may take at most, and how a message says that and what changes it."""
    most = int((_GPU_SHARE if _on_gpu(engine) else _MOST) * free_bytes(engine))
    if cache_memory is not None and not (_on_gpu(engine) and cache_memory > most):
        return cache_memory, f"cache_memory allows {_gigabytes(cache_memory)}: raise it"
    if engine.cache_budget is not None:
        most = min(engine.cache_budget, most)
        return most, f"max_memory or cache_memory of the load leaves {_gigabytes(most)}: raise it, set cache_memory"
    return most, f"{_gigabytes(most)} of the free memory can be used: free some"


def _on_gpu(engine: Engine) -> bool:
    return engine.device.type == "cuda"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
