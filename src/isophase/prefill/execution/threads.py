"""Work on several heads at once: one head's many short steps do not fill several threads, two heads do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Given = TypeVar("Given")
Made = TypeVar("Made")


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch's threads while the block lasts, for calls from this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_by_piece(pieces: int) -> int:
    """Torch's threads that are there for each of so many pieces of work, 1 or more."""
    return max(1, torch.get_num_threads() // pieces)


class Crew:
    """Threads that work on pieces side by side.

    Args:
        pool: None: there is one thread, the caller's.
    """

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool

    def map(self, do: Callable[[Given], Made], given: Iterable[Given]) -> list[Made]:
        """Call a function for many things, in their order as threads come free; results in the same order."""
        if self._pool is None:
            return [do(one) for one in given]
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def within(one: Given) -> Made:
            # Both are kept by thread.
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return do(one)

        return list(self._pool.map(within, given))


@contextmanager
def side_by_side(pieces: int) -> Iterator[Crew]:
    """Spread torch's threads over pieces of work, and each piece's calls over the threads that are left for it.

    Args:
        pieces: how many there are.
    """
    workers, share = min(torch.get_num_threads(), pieces), threads_by_piece(pieces)
    if workers < 2:
        yield Crew(None)
        return
    # Set in each thread, too: a new one takes the number that was set last, by whomever.
    with threads(share), ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,)) as pool:
        yield Crew(pool)
