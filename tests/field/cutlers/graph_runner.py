"""CUDA-graph replay: static input arenas, capture streams, and a runner that wraps both."""
from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Callable, Iterator, Optional

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


class InputArena:
    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.tokens = [0] * batch
        self.stream = torch.cuda.Stream() if torch is not None and torch.cuda.is_available() else None


class ArenaDepot:
    """Static inputs by padded batch size: withdraw() / deposit()."""

    SIZES = (1, 2, 4, 8, 16, 32)

    def __init__(self, per_size: int = 2) -> None:
        self._shelf = {s: [InputArena(s) for _ in range(per_size)] for s in self.SIZES}

    def withdraw(self, batch: int) -> Optional[InputArena]:
        for size in self.SIZES:
            if size >= batch and self._shelf[size]:
                return self._shelf[size].pop()
        return None

    def deposit(self, arena: InputArena) -> None:
        self._shelf[arena.batch].append(arena)

    def idle(self) -> int:
        return sum(len(v) for v in self._shelf.values())


class GraphCache:
    """Thin layer over the depot that counts misses."""

    def __init__(self, depot: ArenaDepot) -> None:
        self.depot = depot
        self.misses = 0

    def fetch(self, batch: int) -> Optional[InputArena]:
        arena = self.depot.withdraw(batch)  # clean: returned to the caller
        if arena is None:
            self.misses += 1
        return arena

    def stash(self, arena: InputArena) -> None:
        self.depot.deposit(arena)

    def fetch_filled(self, tokens: list[int]) -> Optional[InputArena]:
        arena = self.fetch(len(tokens))  # clean: near miss, None or the arena itself is returned
        if arena is not None:
            arena.tokens[:len(tokens)] = tokens
        return arena


class ReplayScope:
    """Holds one arena for a replay; a failed replay must not poison the shelf with stale inputs."""

    def __init__(self, cache: GraphCache, tokens: list[int]) -> None:
        self.cache = cache
        self.tokens = tokens
        self.arena: Optional[InputArena] = None

    def __enter__(self) -> Optional[InputArena]:
        self.arena = self.cache.fetch_filled(self.tokens)  # leak: __exit__ returns before stash when the replay raised, and run() survives that
        return self.arena

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.arena is None:
            return False
        if exc_type is not None:
            logger.error("replay failed: %s", exc)
            return False
        self.cache.stash(self.arena)
        self.arena = None
        return False


class WarmScope:
    def __init__(self, cache: GraphCache, batch: int) -> None:
        self.cache = cache
        self.batch = batch
        self.arena: Optional[InputArena] = None

    def __enter__(self) -> Optional[InputArena]:
        self.arena = self.cache.fetch(self.batch)  # clean: near miss, the early return of __exit__ is the one without an arena
        return self.arena

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.arena is None:
            return False
        self.arena.tokens[:] = [0] * self.arena.batch
        self.cache.stash(self.arena)
        self.arena = None
        return exc_type is ValueError


class GraphRunner:
    def __init__(self, cache: GraphCache, replay: Callable[[InputArena], list[int]]) -> None:
        self.cache = cache
        self.replay = replay

    @contextmanager
    def _padded(self, tokens: list[int]) -> Iterator[Optional[InputArena]]:
        arena = self.cache.fetch_filled(tokens)  # leak: no finally, so a replay error that run_padded catches passes stash by
        yield arena
        if arena is not None:
            self.cache.stash(arena)

    def run(self, tokens: list[int]) -> list[int]:
        try:
            with ReplayScope(self.cache, tokens) as arena:  # clean: used by with, the fault is in the scope itself
                if arena is None:
                    return []
                return self.replay(arena)[:len(tokens)]
        except RuntimeError:
            return []

    def run_padded(self, tokens: list[int]) -> list[int]:
        try:
            with self._padded(tokens) as arena:  # clean: used by with, the fault is in the context manager itself
                return self.replay(arena)[:len(tokens)] if arena is not None else []
        except RuntimeError:
            return []

    def warm(self, sizes: list[int]) -> int:
        n = 0
        for size in sizes:
            with WarmScope(self.cache, size) as arena:  # clean: __exit__ stashes
                if arena is None:
                    continue
                self.replay(arena)
                n += 1
        return n

    def run_or_eager(self, tokens: list[int], eager: Callable[[list[int]], list[int]]) -> list[int]:
        arena = self.cache.fetch_filled(tokens)  # leak: a batch that needs too much padding goes eager without stash
        if arena is None or arena.batch > 2 * len(tokens):
            return eager(tokens)
        out = self.replay(arena)[:len(tokens)]
        self.cache.stash(arena)
        return out
