"""Weight updates from a trainer into running engines: buckets, two-phase switch."""
from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field
from types import TracebackType
from typing import Dict, Iterator, List, Optional, Tuple, Type

import torch

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    IDLE = "idle"
    LOADING = "loading"
    READY = "ready"


@dataclass
class Bucket:
    bid: int
    data: torch.Tensor
    names: List[str] = field(default_factory=list)
    used: int = 0

    def room(self) -> int:
        return self.data.numel() - self.used


class BucketPool:
    def __init__(self, n: int, numel: int) -> None:
        self._buckets = {i: Bucket(i, torch.empty(numel)) for i in range(n)}
        self._taken: set[int] = set()

    def take_bucket(self) -> Optional[Bucket]:
        for i, b in self._buckets.items():
            if i not in self._taken:
                self._taken.add(i)
                return b
        return None

    def return_bucket(self, b: Bucket) -> None:
        b.used = 0
        b.names.clear()
        self._taken.discard(b.bid)


class UpdateSession:
    """with UpdateSession(pool) as s: s.add(...)"""

    def __init__(self, pool: BucketPool, commit_on_exit: bool = True) -> None:
        self.pool = pool
        self.commit_on_exit = commit_on_exit
        self.phase = Phase.IDLE
        self.full: List[Bucket] = []
        self.open: Optional[Bucket] = None
        self.meta: Optional[Bucket] = None

    def __enter__(self) -> "UpdateSession":
        self.phase = Phase.LOADING
        self.meta = self.pool.take_bucket()  # leak: the exit returns full and open, meta is left out
        return self

    def add(self, name: str, w: torch.Tensor) -> bool:
        if self.open is None or self.open.room() < w.numel():
            self._seal()
            self.open = self.pool.take_bucket()  # clean: near miss, the open one was sealed first, the exit returns all
        if self.open is None or self.open.room() < w.numel():
            return False
        self.open.data[self.open.used : self.open.used + w.numel()].copy_(w.flatten())
        self.open.used += w.numel()
        self.open.names.append(name)
        return True

    def add_big(self, name: str, parts: List[torch.Tensor]) -> bool:
        got: List[Bucket] = []
        for p in parts:
            b = self.pool.take_bucket()  # leak: parts that do not fit stop the loop without a return of what was taken
            if b is None or b.room() < p.numel():
                logger.error("part of %s does not fit", name)
                return False
            b.data[: p.numel()].copy_(p.flatten())
            got.append(b)
        self.full += got
        return True

    def _seal(self) -> None:
        if self.open is not None:
            self.full.append(self.open)
            self.open = None

    def __exit__(self, et: Optional[Type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        self._seal()
        for b in self.full:
            self.pool.return_bucket(b)
        self.full = []
        self.phase = Phase.IDLE


class Engine:
    def __init__(self, pool: BucketPool) -> None:
        self.pool = pool
        self.params: Dict[str, torch.Tensor] = {}
        self.staged: Optional[Bucket] = None
        self.backup: Optional[Bucket] = None

    def stage(self, name: str, w: torch.Tensor) -> bool:
        b = self.pool.take_bucket()  # clean: the staged one is committed or abandoned, both return it
        if b is None:
            return False
        if self.staged is not None:
            self.pool.return_bucket(self.staged)
        b.data[: w.numel()].copy_(w.flatten())
        b.used = w.numel()
        b.names.append(name)
        self.staged = b
        return True

    def commit(self) -> bool:
        if self.staged is None:
            return False
        b, self.staged = self.staged, None
        self.params[b.names[0]] = b.data[: b.used].clone()
        self.pool.return_bucket(b)
        return True

    def abandon(self) -> None:
        if self.staged is not None:
            self.pool.return_bucket(self.staged)
            self.staged = None

    def save(self, name: str) -> bool:
        self.backup = self.pool.take_bucket()  # leak: a second save overwrites the backup, and restore with no such name drops it
        if self.backup is None:
            return False
        w = self.params[name]
        self.backup.data[: w.numel()].copy_(w)
        self.backup.used = w.numel()
        self.backup.names.append(name)
        return True

    def restore(self, name: str) -> bool:
        b, self.backup = self.backup, None
        if b is None or name not in b.names:
            return False
        self.params[name] = b.data[: b.used].clone()
        self.pool.return_bucket(b)
        return True

    def update(self, ws: Dict[str, torch.Tensor]) -> int:
        n = 0
        with UpdateSession(self.pool) as s:  # clean: with statement
            for name, w in ws.items():
                if not s.add(name, w):
                    break
                n += 1
        return n

    def diff(self, name: str, w: torch.Tensor) -> Optional[float]:
        b = self.pool.take_bucket()  # leak: an unknown name raises with the bucket taken
        if b is None:
            return None
        if name not in self.params:
            raise KeyError(name)
        head = b.data[: w.numel()]
        torch.sub(self.params[name], w.flatten(), out=head)
        d = float(head.abs().max())
        self.pool.return_bucket(b)
        return d

    def ema(self, name: str, w: torch.Tensor, a: float) -> bool:
        b = self.pool.take_bucket()  # clean: near miss, lerp_ works in place on a view of the bucket that is returned
        if b is None:
            return False
        head = b.data[: w.numel()]
        head.copy_(self.params[name])
        head = head.lerp_(w.flatten(), a)
        self.params[name] = head.clone()
        self.pool.return_bucket(b)
        return True

    def stream(self, ws: Iterator[Tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
        for name, w in ws:
            b = self.pool.take_bucket()  # clean: near miss, returned when it does not fit, else the consumer gets it
            if b is None:
                return
            if b.room() < w.numel():
                self.pool.return_bucket(b)
                continue
            b.data[: w.numel()].copy_(w.flatten())
            b.used = w.numel()
            b.names.append(name)
            yield b

    def apply_stream(self, ws: Iterator[Tuple[str, torch.Tensor]]) -> int:
        n = 0
        for b in self.stream(ws):  # clean: each bucket is returned in the loop
            self.params[b.names[0]] = b.data[: b.used].clone()
            self.pool.return_bucket(b)
            n += 1
        return n

    def apply_known(self, ws: Iterator[Tuple[str, torch.Tensor]]) -> int:
        n = 0
        for b in self.stream(ws):  # leak: buckets with names that are not known are skipped
            if b.names[0] not in self.params:
                continue
            self.params[b.names[0]] = b.data[: b.used].clone()
            self.pool.return_bucket(b)
            n += 1
        return n
