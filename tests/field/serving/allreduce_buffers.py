"""Custom all-reduce for tensor parallel decode: symmetric buffers are registered once and lent per call."""
from __future__ import annotations

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from typing import Any, Callable, Generic, Iterator, List, Optional, TypeVar

import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Lender(ABC, Generic[T]):
    @abstractmethod
    def lend(self) -> T: ...

    @abstractmethod
    def restore(self, item: T) -> None: ...

    @contextlib.contextmanager
    def lent(self) -> Iterator[T]:
        item = self.lend()  # clean: restored after the block
        try:
            yield item
        finally:
            self.restore(item)


class SymmetricBuffer:
    def __init__(self, rank: int, numel: int) -> None:
        self.rank = rank
        self.t = torch.zeros(numel)
        self.epoch = 0


class SymmetricPool(Lender[SymmetricBuffer]):
    def __init__(self, world: int, per_rank: int, numel: int) -> None:
        self.world = world
        self._ready: List[SymmetricBuffer] = [SymmetricBuffer(r, numel) for r in range(world) for _ in range(per_rank)]
        self._quarantine: List[SymmetricBuffer] = []

    def lend(self) -> SymmetricBuffer:
        buf = self._ready.pop()
        buf.epoch += 1
        return buf

    def restore(self, item: SymmetricBuffer) -> None:
        self._ready.append(item)

    def lend_for(self, rank: int) -> Optional[SymmetricBuffer]:
        tried = []
        found = None
        while self._ready and found is None:
            buf = self._ready.pop()  # clean: near miss, those of other ranks are collected and put back
            if buf.rank == rank:
                found = buf
            else:
                tried.append(buf)
        self._ready.extend(tried)
        return found

    def lend_fresh(self, max_epoch: int) -> Optional[SymmetricBuffer]:
        while self._ready:
            buf = self._ready.pop()  # clean: near miss, an old one goes into quarantine, which recover empties
            if buf.epoch > max_epoch:
                self._quarantine.append(buf)
                continue
            return buf
        return None

    def recover(self) -> int:
        n = len(self._quarantine)
        while self._quarantine:
            buf = self._quarantine.pop()  # clean: back among the ready ones
            buf.epoch = 0
            self._ready.append(buf)
        return n


class Logged(SymmetricPool):
    """Wrapper with a log line per lease."""

    def lend(self) -> SymmetricBuffer:
        buf = super().lend()  # clean: handed to the caller
        logger.debug("lend %d (epoch %d)", buf.rank, buf.epoch)
        return buf


class Bounded(SymmetricPool):
    def __init__(self, world: int, per_rank: int, numel: int, max_epoch: int) -> None:
        super().__init__(world, per_rank, numel)
        self.max_epoch = max_epoch

    def lend(self) -> SymmetricBuffer:
        buf = super().lend()  # leak: the buffer is dropped by the raise for its epoch
        if buf.epoch > self.max_epoch:
            raise RuntimeError(f"buffer of rank {buf.rank} is worn out")
        return buf


def on_buffer(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(fn)
    def inner(self: "AllReduce", *args: Any) -> torch.Tensor:
        with self.pool.lent() as buf:  # clean: with statement
            return fn(self, buf, *args)

    return inner


class AllReduce:
    def __init__(self, pool: SymmetricPool, peers: List[torch.Tensor], threshold: int = 1 << 16) -> None:
        self.pool = pool
        self.peers = peers
        self.threshold = threshold
        self.bound: Optional[SymmetricBuffer] = None
        self.fresh: Optional[SymmetricBuffer] = None

    def _gather(self, t: torch.Tensor) -> None:
        for p in self.peers:
            t[: p.numel()].add_(p.flatten())

    @on_buffer
    def reduce_small(self, buf: SymmetricBuffer, x: torch.Tensor) -> torch.Tensor:
        buf.t[: x.numel()].copy_(x.flatten())
        self._gather(buf.t)
        return buf.t[: x.numel()].clone().view_as(x)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.pool.lend()  # leak: large tensors take the other path with the buffer lent
        if x.numel() > self.threshold:
            return torch.stack([x, *self.peers]).sum(dim=0)
        buf.t[: x.numel()].copy_(x.flatten())
        self._gather(buf.t)
        out = buf.t[: x.numel()].clone().view_as(x)
        self.pool.restore(buf)
        return out

    def reduce_or_fallback(self, x: torch.Tensor) -> torch.Tensor:
        buf = None if x.numel() > self.threshold else self.pool.lend()  # clean: near miss, the one path on which it was lent restores it
        if buf is None:
            return torch.stack([x, *self.peers]).sum(dim=0)
        buf.t[: x.numel()].copy_(x.flatten())
        self._gather(buf.t)
        out = buf.t[: x.numel()].clone().view_as(x)
        self.pool.restore(buf)
        return out

    def reduce_rank(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        buf = self.pool.lend_for(rank)  # leak: the tensor of the buffer is returned, the buffer itself is not restored
        if buf is None:
            return x
        buf.t[: x.numel()].copy_(x.flatten())
        self._gather(buf.t)
        return buf.t[: x.numel()].clone()

    def bind(self) -> torch.Tensor:
        if self.bound is None:
            self.bound = self.pool.lend()  # clean: bound once, unbind restores it
        return self.bound.t

    def bind_fresh(self, max_epoch: int) -> Optional[torch.Tensor]:
        self.fresh = self.pool.lend_fresh(max_epoch)  # leak: the fresh one bound before is overwritten
        return None if self.fresh is None else self.fresh.t

    def unbind(self) -> None:
        b, self.bound = self.bound, None
        if b is not None:
            self.pool.restore(b)
        f, self.fresh = self.fresh, None
        if f is not None:
            self.pool.restore(f)

    def two_shot(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as st:
            a = st.enter_context(self.pool.lent())  # clean: the stack restores it
            b = self.pool.lend()  # clean: near miss, the callback restores it
            st.callback(self.pool.restore, b)
            half = x.numel() // 2
            a.t[:half].copy_(x.flatten()[:half])
            b.t[: x.numel() - half].copy_(x.flatten()[half:])
            self._gather(a.t)
            self._gather(b.t)
            return torch.cat([a.t[:half], b.t[: x.numel() - half]]).view_as(x)

    def two_shot_manual(self, x: torch.Tensor) -> torch.Tensor:
        a = self.pool.lend()  # clean: restored on both ways
        half = x.numel() // 2
        if half == 0:
            self.pool.restore(a)
            return x
        b = self.pool.lend()  # leak: only a is restored at the end
        a.t[:half].copy_(x.flatten()[:half])
        b.t[: x.numel() - half].copy_(x.flatten()[half:])
        out = torch.cat([a.t[:half], b.t[: x.numel() - half]]).view_as(x)
        self.pool.restore(a)
        return out
