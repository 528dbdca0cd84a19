from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Arena:
    idx: int
    data: torch.Tensor
    views: int = 0


@dataclass(eq=False)
class ArenaPool:
    count: int
    nbytes: int
    _idle: list[Arena] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._idle = [Arena(i, torch.empty(self.nbytes, dtype=torch.uint8)) for i in range(self.count)]

    def rent(self) -> Arena | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def unrent(self, arena: Arena) -> None:
        with self._lock:
            self._idle.append(arena)

    def shrink(self, keep: int) -> int:
        dropped = 0
        while len(self._idle) > keep:
            self._idle.pop()  # clean: near miss, the arena is dropped on purpose and count goes down with it
            dropped += 1
        self.count -= dropped
        return dropped


class Lease:
    def __init__(self, pool: ArenaPool) -> None:
        self.pool = pool
        self.arena: Arena | None = None

    def __enter__(self) -> Arena | None:
        self.arena = self.pool.rent()  # leak: __exit__ returns early after a StopIteration and keeps the arena
        return self.arena

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: object) -> bool:
        if exc_type is StopIteration:
            return True
        if self.arena is not None:
            self.pool.unrent(self.arena)
            self.arena = None
        return False
