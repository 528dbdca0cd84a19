"""Ring communicator for sequence-parallel attention with double buffered K/V exchange."""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor


class CommBufferPool:
    """Flat byte buffers, handed out first fit."""

    def __init__(self, device: torch.device, capacity: int = 64) -> None:
        self.device = device
        self.capacity = capacity
        self._idle: List[Tensor] = []
        self._lent: Dict[int, Tensor] = {}
        self._guard = threading.Lock()

    def get_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._guard:
            for i, cand in enumerate(self._idle):
                if cand.numel() >= numel and cand.dtype == dtype:
                    hit = self._idle.pop(i)  # clean: entered in the lent table and returned
                    self._lent[hit.data_ptr()] = hit
                    return hit
            fresh = torch.empty(numel, dtype=dtype, device=self.device)
            self._lent[fresh.data_ptr()] = fresh
            return fresh

    def return_buffer(self, buf: Tensor) -> None:
        with self._guard:
            base = self._lent.pop(buf.data_ptr(), None)
            if base is not None and len(self._idle) < self.capacity:
                self._idle.append(base)

    def trim(self, keep: int) -> int:
        dropped = 0
        with self._guard:
            while len(self._idle) > keep:
                self._idle.pop(0)  # clean: near miss, trimming is meant to hand the memory to the allocator
                dropped += 1
        return dropped


@dataclass
class PendingExchange:
    send: Tensor
    recv: Tensor
    works: List = field(default_factory=list)


class RingCommunicator:
    def __init__(self, group, pool: CommBufferPool) -> None:
        self.group = group
        self.pool = pool
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._front: Optional[Tensor] = None
        self._back: Optional[Tensor] = None
        self._pending: Optional[PendingExchange] = None
        self._scratch: Optional[Tensor] = None

    def setup(self, kv: Tensor) -> None:
        self.teardown()
        self._front = self.pool.get_buffer(kv.numel(), kv.dtype)  # clean: returned in teardown
        self._back = self.pool.get_buffer(kv.numel(), kv.dtype)  # clean: near miss, swapped with front but both are returned in teardown
        self._scratch = self.pool.get_buffer(kv.numel(), kv.dtype)  # leak: teardown never returns the scratch buffer
        self._front[: kv.numel()].copy_(kv.reshape(-1))

    def rotate(self) -> Tensor:
        ops = [
            dist.P2POp(dist.isend, self._front, (self.rank + 1) % self.world, self.group),
            dist.P2POp(dist.irecv, self._back, (self.rank - 1) % self.world, self.group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        self._front, self._back = self._back, self._front
        return self._front

    def teardown(self) -> None:
        if self._front is not None:
            self.pool.return_buffer(self._front)
        if self._back is not None:
            self.pool.return_buffer(self._back)
        self._front = None
        self._back = None
        self._scratch = None

    def start_exchange(self, payload: Tensor) -> PendingExchange:
        n = payload.numel()
        send = self.pool.get_buffer(n, payload.dtype)  # clean: moved into the exchange, returned by finish_exchange
        recv = self.pool.get_buffer(n, payload.dtype)  # clean: moved into the exchange, returned by finish_exchange
        send[:n].copy_(payload.reshape(-1))
        exchange = PendingExchange(send, recv)
        exchange.works.append(dist.isend(send[:n], (self.rank + 1) % self.world, self.group))
        exchange.works.append(dist.irecv(recv[:n], (self.rank - 1) % self.world, self.group))
        return exchange

    def finish_exchange(self, exchange: PendingExchange, out: Tensor) -> None:
        for work in exchange.works:
            work.wait()
        out.view(-1).copy_(exchange.recv[: out.numel()])
        self.pool.return_buffer(exchange.send)
        self.pool.return_buffer(exchange.recv)

    def exchange_into(self, payload: Tensor, out: Tensor) -> None:
        exchange = self.start_exchange(payload)  # clean: finished on the next line but one
        out.zero_()
        self.finish_exchange(exchange, out)

    def exchange_if_needed(self, payload: Tensor, out: Tensor) -> bool:
        exchange = self.start_exchange(payload)  # leak: the single-rank early return leaves the exchange unfinished
        if self.world == 1:
            out.copy_(payload)
            return False
        self.finish_exchange(exchange, out)
        return True

    def prefetch(self, payload: Tensor) -> None:
        self._pending = self.start_exchange(payload)  # leak: a second prefetch overwrites the pending exchange

    def collect(self, out: Tensor) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self.finish_exchange(pending, out)


def ring_reduce_lse(comm: RingCommunicator, lse: Tensor) -> Tensor:
    staging = comm.pool.get_buffer(lse.numel(), lse.dtype)  # clean: near miss, the view shares storage and is what goes back
    view = staging[: lse.numel()].view_as(lse)
    view.copy_(lse)
    dist.all_reduce(view, op=dist.ReduceOp.MAX, group=comm.group)
    result = view.clone()
    comm.pool.return_buffer(view)
    return result


def gather_lengths(comm: RingCommunicator, lengths: Tensor) -> Tuple[Tensor, int]:
    packed = comm.pool.get_buffer(lengths.numel() * comm.world, lengths.dtype)  # leak: contiguous copy of the transpose replaces the pooled tensor before it is returned
    dist.all_gather_into_tensor(packed[: lengths.numel() * comm.world], lengths.reshape(-1), group=comm.group)
    packed = packed[: lengths.numel() * comm.world].view(comm.world, -1).t().contiguous()
    longest = int(packed.max())
    table = packed.clone()
    comm.pool.return_buffer(packed)
    return table, longest


def probe_latency(comm: RingCommunicator, numel: int, rounds: int) -> List[float]:
    samples: List[float] = []
    for i in range(rounds):
        ball = comm.pool.get_buffer(numel, torch.uint8)  # leak: the warm-up round continues before the return to the pool
        start = time.perf_counter()
        dist.broadcast(ball[:numel], 0, group=comm.group)
        if i == 0:
            continue
        samples.append(time.perf_counter() - start)
        comm.pool.return_buffer(ball)
    return samples


def staged_total(comm: RingCommunicator, parts: List[Tensor]) -> float:
    bufs: List[Tensor] = []
    for part in parts:
        buf = comm.pool.get_buffer(part.numel(), part.dtype)  # leak: the buffer at the local rank's index is skipped by the returning loop
        buf[: part.numel()].copy_(part.reshape(-1))
        bufs.append(buf)
    total = sum(float(b[: p.numel()].sum()) for b, p in zip(bufs, parts))
    for i, buf in enumerate(bufs):
        if i != comm.rank:
            comm.pool.return_buffer(buf)
    return total
