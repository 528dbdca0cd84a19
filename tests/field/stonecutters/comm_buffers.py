"""Reference-counted communication buffers for ZeRO-style gathers.

A full parameter lives in a gathered buffer as long as any module needs it.  The
buffer goes back to the size class it came from when the last reference is put.
"""
from __future__ import annotations

import bisect
import logging
import threading
import weakref
from typing import Any, Dict, Iterator, List, Optional, Set

import torch
import torch.distributed as dist

LOG = logging.getLogger(__name__)


class CommBuffer:
    def __init__(self, owner: "CommArena", size: int, device):
        self.owner = owner
        self.size = size
        self.data = torch.empty(size, dtype=torch.bfloat16, device=device)
        self.refs = 0

    def ref(self) -> "CommBuffer":
        self.refs += 1
        return self

    def put(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.owner._home(self)


class CommArena:
    def __init__(self, classes: List[int], per_class: int, device):
        self.classes = sorted(classes)
        self._bins: Dict[int, List[CommBuffer]] = {
            c: [CommBuffer(self, c, device) for _ in range(per_class)] for c in self.classes
        }
        self._mu = threading.Lock()

    def _home(self, buf: CommBuffer) -> None:
        with self._mu:
            self._bins[buf.size].append(buf)

    def get(self, numel: int) -> Optional[CommBuffer]:
        """A buffer with one reference, or None."""
        at = bisect.bisect_left(self.classes, numel)
        with self._mu:
            for c in self.classes[at:]:
                if self._bins[c]:
                    return self._bins[c].pop().ref()  # clean: handed to the caller
        return None

    def get_exact(self, numel: int) -> Optional[CommBuffer]:
        buf = self.get(numel)  # leak: a buffer of a bigger class is refused and not put
        if buf is None or buf.size != numel:
            return None
        return buf

    def get_many(self, numels: List[int]) -> Optional[List[CommBuffer]]:
        bufs: List[CommBuffer] = []
        for n in numels:
            b = self.get(n)  # clean: near miss, all that were taken are put when one is missing
            if b is None:
                break
            bufs.append(b)
        if len(bufs) < len(numels):
            for b in bufs:
                b.put()
            return None
        return bufs


class GatheredParams:
    def __init__(self, arena: CommArena, group):
        self.arena = arena
        self.group = group
        self.live: Dict[int, CommBuffer] = {}
        self.users: Dict[int, Set[str]] = {}

    def gather(self, pid: int, shard: torch.Tensor, user: str) -> Optional[torch.Tensor]:
        buf = self.live.get(pid)
        if buf is None:
            world = dist.get_world_size(self.group)
            buf = self.arena.get(shard.numel() * world)  # clean: kept in live until the last user lets go
            if buf is None:
                return None
            dist.all_gather_into_tensor(buf.data[: shard.numel() * world], shard, group=self.group)
            self.live[pid] = buf
            self.users[pid] = set()
        self.users[pid].add(user)
        return buf.data

    def let_go(self, pid: int, user: str) -> None:
        users = self.users.get(pid)
        if users is None:
            return
        users.discard(user)
        if not users:
            del self.users[pid]
            self.live.pop(pid).put()

    def peek_norm(self, pid: int) -> Optional[float]:
        if pid not in self.live:
            return None
        buf = self.live[pid].ref()  # leak: a zero-sized norm returns before the put
        norm = float(buf.data.float().norm())
        if norm == 0.0:
            LOG.info("parameter %d is all zero", pid)
            return None
        buf.put()
        return norm

    def copy_out(self, pid: int, into: torch.Tensor) -> bool:
        buf = self.live.get(pid)
        if buf is None:
            return False
        buf.ref()  # clean: put in finally
        try:
            into.copy_(buf.data[: into.numel()].view_as(into))
        finally:
            buf.put()
        return True

    def iter_live(self) -> Iterator[torch.Tensor]:
        for pid in list(self.live):
            buf = self.live.get(pid)
            if buf is None:
                continue
            buf.ref()  # clean: near miss, put in finally even if the consumer stops
            try:
                yield buf.data
            finally:
                buf.put()


class ReduceQueue:
    """Reductions in flight; each holds one reference to its buffer."""

    def __init__(self, arena: CommArena, group, max_inflight: int):
        self.arena = arena
        self.group = group
        self.max_inflight = max_inflight
        self.inflight: List[Any] = []
        self.errors = 0

    def push(self, grad: torch.Tensor) -> bool:
        buf = self.arena.get(grad.numel())  # leak: dropped when the queue is full
        if buf is None:
            return False
        if len(self.inflight) >= self.max_inflight:
            return False
        buf.data[: grad.numel()].copy_(grad.flatten())
        work = dist.all_reduce(buf.data[: grad.numel()], group=self.group, async_op=True)
        self.inflight.append((work, buf, grad))
        return True

    def push_now(self, grad: torch.Tensor) -> bool:
        if len(self.inflight) >= self.max_inflight:
            self.drain()
        buf = self.arena.get(grad.numel())  # clean: near miss, moved into inflight, emptied by drain()
        if buf is None:
            return False
        buf.data[: grad.numel()].copy_(grad.flatten())
        work = dist.all_reduce(buf.data[: grad.numel()], group=self.group, async_op=True)
        self.inflight.append((work, buf, grad))
        return True

    def drain(self) -> None:
        pending, self.inflight = self.inflight, []
        for work, buf, grad in pending:
            try:
                work.wait()
                grad.copy_(buf.data[: grad.numel()].view_as(grad))
            except RuntimeError as exc:
                self.errors += 1
                LOG.error("reduction failed: %s", exc)
            finally:
                buf.put()

    def reduce_pair(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        bufs = self.arena.get_many([a.numel(), b.numel()])  # leak: only the first of the two is put
        if bufs is None:
            return False
        for buf, t in zip(bufs, (a, b)):
            buf.data[: t.numel()].copy_(t.flatten())
        first, second = bufs
        dist.all_reduce(first.data, group=self.group)
        dist.all_reduce(second.data, group=self.group)
        a.copy_(first.data[: a.numel()].view_as(a))
        b.copy_(second.data[: b.numel()].view_as(b))
        first.put()
        return True

    def reduce_list(self, tensors: List[torch.Tensor]) -> bool:
        bufs = self.arena.get_many([t.numel() for t in tensors])  # clean: all put in the loop
        if bufs is None:
            return False
        for buf, t in zip(bufs, tensors):
            part = buf.data[: t.numel()]
            part.copy_(t.flatten())
            dist.all_reduce(part, group=self.group)
            t.copy_(part.view_as(t))
            buf.put()
        return True


class BorrowedView:
    """Puts its buffer when it is closed or collected."""

    def __init__(self, arena: CommArena, numel: int):
        self._buf = arena.get(numel)  # clean: near miss, the finalizer puts it
        if self._buf is not None:
            self._fin = weakref.finalize(self, self._buf.put)
        else:
            self._fin = None

    @property
    def data(self) -> Optional[torch.Tensor]:
        return None if self._buf is None else self._buf.data

    def close(self) -> None:
        if self._fin is not None:
            self._fin()


def broadcast_state(arena: CommArena, tensors: Dict[str, torch.Tensor], src: int, group) -> int:
    sent = 0
    buf = None
    for name, t in tensors.items():
        if buf is None or buf.size < t.numel():
            buf = arena.get(t.numel())  # leak: a larger tensor replaces the buffer without a put
            if buf is None:
                LOG.warning("no buffer for %s", name)
                break
        part = buf.data[: t.numel()]
        part.copy_(t.flatten())
        dist.broadcast(part, src=src, group=group)
        t.copy_(part.view_as(t))
        sent += 1
    if buf is not None:
        buf.put()
    return sent
