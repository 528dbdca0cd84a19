"""Runs of blocks: allocated many at a time, split, joined and freed in parts."""
from __future__ import annotations

from typing import Iterable


class RunPool:
    def __init__(self, n: int) -> None:
        self._free: list[int] = list(range(n))

    def alloc_run(self, n: int) -> list[int]:
        if n > len(self._free):
            return []
        run, self._free = self._free[:n], self._free[n:]
        return run

    def free_run(self, run: Iterable[int]) -> None:
        self._free.extend(run)


def split_head(pool: RunPool, n: int) -> int:
    head, *rest = pool.alloc_run(n) or [-1]  # leak: the rest is freed, the head is returned as a number and forgotten
    pool.free_run(rest)
    return 1 if head >= 0 else 0


def split_and_free(pool: RunPool, n: int) -> int:
    run = pool.alloc_run(n)  # clean: near miss, head and rest freed one after the other
    if not run:
        return 0
    head, *rest = run
    pool.free_run([head])
    pool.free_run(rest)
    return len(rest) + 1


def join(pool: RunPool, sizes: list[int]) -> int:
    joined: list[int] = []
    for size in sizes:
        joined += pool.alloc_run(size)  # clean: near miss, joined into one list that is freed as a whole
    total = len(joined)
    pool.free_run(joined)
    return total


def join_sorted(pool: RunPool, sizes: list[int]) -> list[int]:
    joined = [b for size in sizes for b in pool.alloc_run(size)]  # clean: near miss, a sorted copy of the blocks is freed, which are all of them
    ordered = sorted(joined)
    gaps = [y - x for x, y in zip(ordered, ordered[1:])]
    pool.free_run(ordered)
    return gaps


def join_distinct(pool: RunPool, sizes: list[int]) -> int:
    kept: list[int] = []
    for size in sizes:
        run = pool.alloc_run(size)  # leak: runs that start low are not kept and not freed
        if not run:
            continue
        if run[0] > 4:
            kept.extend(run)
    pool.free_run(kept)
    return len(kept)


def best_fit(pool: RunPool, wanted: int, smallest: int) -> list[int]:
    size = wanted
    run = pool.alloc_run(size)  # clean: near miss, an empty run holds nothing, so rebinding loses nothing
    while not run and size > smallest:
        size //= 2
        run = pool.alloc_run(size)  # clean: near miss, the first that is not empty is returned
    return run


def largest_run(pool: RunPool, limit: int) -> int:
    size = 1
    run = pool.alloc_run(size)  # leak: a longer run replaces it without freeing it
    while run and size < limit:
        size *= 2
        run = pool.alloc_run(size)  # leak: replaced by the next longer run
    pool.free_run(run)
    return size


def largest_run_by_steps(pool: RunPool, limit: int) -> int:
    size = 1
    while size < limit:
        run = pool.alloc_run(size)  # clean: near miss, an empty run needs no freeing, others are freed each round
        if not run:
            break
        pool.free_run(run)
        size *= 2
    return size


def use_best(pool: RunPool, wanted: int) -> int:
    run = best_fit(pool, wanted, 1)  # clean: freed whatever its length
    n = len(run)
    pool.free_run(run)
    return n


def use_half(pool: RunPool, wanted: int) -> int:
    run = best_fit(pool, wanted, 1)  # leak: the front half is freed only
    half = len(run) // 2
    pool.free_run(run[:half])
    return half
