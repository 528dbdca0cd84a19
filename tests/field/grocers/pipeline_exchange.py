"""Point-to-point exchange between pipeline stages: send/recv buffers and credits."""
from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class P2PBuffers:
    """Registered activation buffers. obtain() gives None when none is free."""

    def __init__(self, count: int, shape: Tuple[int, ...]):
        self._free = [torch.empty(shape, device="cuda") for _ in range(count)]
        self._lock = threading.Lock()

    def obtain(self) -> Optional[torch.Tensor]:
        with self._lock:
            return self._free.pop() if self._free else None

    def relinquish(self, buf: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buf)


class Credits:
    """Flow-control credits towards a peer."""

    def __init__(self, n: int):
        self._sem = threading.Semaphore(n)

    def spend(self) -> bool:
        return self._sem.acquire(blocking=False)

    def refund(self) -> None:
        self._sem.release()


class Receiver:
    """Posts receives per microbatch and hands the buffers to the stage."""

    def __init__(self, bufs: P2PBuffers, src: int):
        self.bufs = bufs
        self.src = src
        self.posted: Dict[int, Tuple[torch.Tensor, dist.Work]] = {}
        self.in_use: Dict[int, torch.Tensor] = {}

    def post(self, mb: int) -> bool:
        if mb in self.posted or mb in self.in_use:
            return False
        buf = self.bufs.obtain()  # clean: posted or in use, both done and flush give it back
        if buf is None:
            return False
        self.posted[mb] = (buf, dist.irecv(buf, self.src, tag=mb))
        return True

    def take(self, mb: int) -> torch.Tensor:
        buf, work = self.posted.pop(mb)
        work.wait()
        self.in_use[mb] = buf
        return buf

    def done(self, mb: int) -> None:
        self.bufs.relinquish(self.in_use.pop(mb))

    def flush(self) -> None:
        for buf, work in self.posted.values():
            work.wait()
            self.bufs.relinquish(buf)
        self.posted.clear()
        for buf in self.in_use.values():
            self.bufs.relinquish(buf)
        self.in_use.clear()


class Sender:
    """Sends spend a credit which the peer's acknowledgement refunds."""

    def __init__(self, bufs: P2PBuffers, credits: Credits, dst: int):
        self.bufs = bufs
        self.credits = credits
        self.dst = dst
        self.unacked: Dict[int, torch.Tensor] = {}

    def send(self, mb: int, t: torch.Tensor) -> bool:
        if mb in self.unacked:
            return True
        if not self.credits.spend():  # leak: no buffer is free and the credit just spent is not refunded
            return False
        buf = self.bufs.obtain()  # clean: unacked until ack or reset
        if buf is None:
            return False
        buf.copy_(t)
        dist.isend(buf, self.dst, tag=mb)
        self.unacked[mb] = buf
        return True

    def ack(self, mb: int) -> None:
        buf = self.unacked.pop(mb, None)
        if buf is not None:
            self.bufs.relinquish(buf)
            self.credits.refund()

    def reset(self) -> None:
        for mb in list(self.unacked):
            self.ack(mb)


class BatchedSender:
    """Collects tensors and sends them in one go."""

    def __init__(self, bufs: P2PBuffers, credits: Credits, dst: int):
        self.bufs = bufs
        self.credits = credits
        self.dst = dst
        self.batch: List[torch.Tensor] = []

    def add(self, t: torch.Tensor) -> bool:
        if not self.credits.spend():  # clean: refunded without a buffer, else one per batch member in flush
            return False
        buf = self.bufs.obtain()  # leak: flush relinquishes up to the first failing send and clears the batch
        if buf is None:
            self.credits.refund()
            return False
        buf.copy_(t)
        self.batch.append(buf)
        return True

    def flush(self) -> int:
        sent = 0
        for buf in self.batch:
            try:
                dist.send(buf, self.dst)
            except RuntimeError:
                log.exception("send to %d failed", self.dst)
                break
            self.bufs.relinquish(buf)
            sent += 1
        for _ in self.batch:
            self.credits.refund()
        self.batch.clear()
        return sent


@dataclass
class Flight:
    mb: int
    act: Optional[torch.Tensor] = None
    grad: Optional[torch.Tensor] = None


class StageState:
    """Activation and gradient buffers of the microbatches in flight."""

    def __init__(self, bufs: P2PBuffers):
        self.bufs = bufs
        self.flights: Dict[int, Flight] = {}

    def forward(self, mb: int, x: torch.Tensor) -> bool:
        f = self.flights.setdefault(mb, Flight(mb))
        if f.act is None:
            f.act = self.bufs.obtain()  # clean: near miss, guarded field, backward, finish and rollback give it back
        if f.act is None:
            return False
        f.act.copy_(x)
        return True

    def backward(self, mb: int, g: torch.Tensor) -> bool:
        f = self.flights[mb]
        if f.grad is None:
            f.grad = self.bufs.obtain()  # leak: rollback of the flight relinquishes act only
        if f.grad is None:
            return False
        f.grad.copy_(g)
        if f.act is not None:
            self.bufs.relinquish(f.act)
            f.act = None
        return True

    def finish(self, mb: int) -> None:
        f = self.flights.pop(mb)
        for buf in (f.act, f.grad):
            if buf is not None:
                self.bufs.relinquish(buf)

    def rollback(self, first: int) -> None:
        for mb in [m for m in self.flights if m >= first]:
            f = self.flights.pop(mb)
            if f.act is not None:
                self.bufs.relinquish(f.act)


class ChannelMux:
    """Queues by channel; closing a channel ends what waits in it."""

    def __init__(self, bufs: P2PBuffers):
        self.bufs = bufs
        self.queues: Dict[str, Deque[torch.Tensor]] = defaultdict(deque)
        self.urgent: Deque[torch.Tensor] = deque()

    def enqueue(self, channel: str, t: torch.Tensor) -> bool:
        buf = self.bufs.obtain()  # clean: pump and close_channel relinquish
        if buf is None:
            return False
        buf.copy_(t)
        self.queues[channel].append(buf)
        return True

    def enqueue_urgent(self, t: torch.Tensor) -> bool:
        buf = self.bufs.obtain()  # clean: near miss, the queue is drained by pump and by close
        if buf is None:
            return False
        buf.copy_(t)
        self.urgent.append(buf)
        return True

    def pump(self, dst: int) -> None:
        for q in (self.urgent, *self.queues.values()):
            while q:
                buf = q.popleft()
                dist.send(buf, dst)
                self.bufs.relinquish(buf)

    def close_channel(self, channel: str) -> None:
        for buf in self.queues.pop(channel, ()):
            self.bufs.relinquish(buf)

    def close(self) -> None:
        for channel in list(self.queues):
            self.close_channel(channel)
        while self.urgent:
            self.bufs.relinquish(self.urgent.popleft())


class Resender:
    """Holds the last sent buffer per peer for a resend."""

    def __init__(self, bufs: P2PBuffers):
        self.bufs = bufs
        self.last: Dict[int, torch.Tensor] = {}

    def send(self, dst: int, t: torch.Tensor) -> bool:
        buf = self.bufs.obtain()  # leak: a peer joined anew gets None in the table, whose buffer is not given back
        if buf is None:
            return False
        buf.copy_(t)
        dist.send(buf, dst)
        old = self.last.get(dst)
        self.last[dst] = buf
        if old is not None:
            self.bufs.relinquish(old)
        return True

    def rejoin(self, dst: int) -> None:
        if dst in self.last:
            self.last[dst] = None

    def close(self) -> None:
        for buf in self.last.values():
            if buf is not None:
                self.bufs.relinquish(buf)
        self.last.clear()


def ring_shift(bufs: P2PBuffers, x: torch.Tensor, world: int, rank: int) -> Optional[torch.Tensor]:
    cur = bufs.obtain()  # clean: near miss, the two are swapped each round and both relinquished
    if cur is None:
        return None
    nxt = bufs.obtain()  # clean: relinquished after the rounds
    if nxt is None:
        bufs.relinquish(cur)
        return None
    cur.copy_(x)
    for _ in range(world - 1):
        ops = [dist.P2POp(dist.isend, cur, (rank + 1) % world), dist.P2POp(dist.irecv, nxt, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        cur, nxt = nxt, cur
    out = cur.clone()
    bufs.relinquish(cur)
    bufs.relinquish(nxt)
    return out
