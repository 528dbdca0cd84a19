"""1F1B pipeline stage: where the activations of in-flight microbatches live until their backward.

A stage owns a preallocated stash tensor that is cut into equal slots (an index each), a second, smaller
table for weight-gradient contributions that are deferred, and a set of receive buffers per shape.
"""
import heapq
import logging
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist

logger = logging.getLogger("pipeline")


class StashFull(RuntimeError): ...
class NonFinite(ArithmeticError): ...


class SlotTable:
    def __init__(self, count: int, name: str) -> None:
        self.name = name
        self.count = count
        self._free = list(range(count))
        heapq.heapify(self._free)
        self.peak = 0

    def acquire(self) -> int:
        if not self._free:
            raise StashFull(f"{self.name}: all {self.count} slots are taken")
        slot = heapq.heappop(self._free)  # clean: the index goes to the caller
        self.peak = max(self.peak, self.count - len(self._free))
        return slot

    def release(self, slot: int) -> None:
        heapq.heappush(self._free, slot)


@dataclass
class RecvBuffer:
    shape: Tuple[int, ...]
    tensor: torch.Tensor
    epoch: int


class RecvBuffers:
    """At most `limit` buffers of a shape exist; when all are out, borrow() answers None."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit, self.device = limit, device
        self.epoch = 0
        self._made: Dict[Tuple[int, ...], int] = defaultdict(int)
        self._idle: Dict[Tuple[int, ...], List[RecvBuffer]] = defaultdict(list)

    def borrow(self, shape: Tuple[int, ...]) -> Optional[RecvBuffer]:
        while self._idle[shape]:
            buf = self._idle[shape].pop()  # leak: a buffer of an older epoch is dropped, though it still counts in _made
            if buf.epoch != self.epoch:
                logger.debug("stale buffer %s", shape)
                continue
            return buf
        if self._made[shape] >= self.limit:
            return None
        self._made[shape] += 1
        return RecvBuffer(shape, torch.empty(shape, device=self.device), self.epoch)  # clean: a new buffer for the caller

    def new_epoch(self) -> None:
        self.epoch += 1

    def restore(self, buf: RecvBuffer) -> None:
        self._idle[buf.shape].append(buf)


@dataclass
class Stashed:
    slot: int
    shape: Tuple[int, ...]
    rng_state: Any = None


class Stage:
    def __init__(self, module: Callable, slots: SlotTable, wgrad: SlotTable, bufs: RecvBuffers, stash: torch.Tensor) -> None:
        self.module = module
        self.slots, self.wgrad, self.bufs = slots, wgrad, bufs
        self.stash = stash
        self.saved: Dict[int, Stashed] = {}
        self.deferred: Dict[int, int] = {}

    def forward(self, mb: int, x: torch.Tensor) -> torch.Tensor:
        slot = self.slots.acquire()  # clean: near miss, kept in self.saved until backward() or reset()
        self.stash[slot, : x.numel()].copy_(x.flatten())
        self.saved[mb] = Stashed(slot, tuple(x.shape), torch.get_rng_state())
        with torch.no_grad():
            return self.module(x)

    def backward(self, mb: int, grad: torch.Tensor) -> torch.Tensor:
        rec = self.saved.pop(mb)
        try:
            n = int(torch.Size(rec.shape).numel())
            x = self.stash[rec.slot, :n].view(rec.shape).clone().requires_grad_()
            torch.set_rng_state(rec.rng_state)
            self.module(x).backward(grad)
            if not torch.isfinite(x.grad).all():
                raise NonFinite(f"microbatch {mb}")
            return x.grad
        finally:
            self.slots.release(rec.slot)

    def defer_wgrad(self, mb: int) -> None:
        self.deferred[mb] = self.wgrad.acquire()  # leak: reset() after a non-finite gradient clears only the activations

    def run_deferred(self) -> None:
        for mb in sorted(self.deferred):
            self.wgrad.release(self.deferred[mb])
        self.deferred = {}

    def reset(self) -> None:
        for rec in self.saved.values():
            self.slots.release(rec.slot)
        self.saved.clear()
        self.deferred = {}


class InterleavedStage(Stage):
    """The same rank runs several model chunks."""

    def __init__(self, chunks: List[Callable], *args: Any) -> None:
        super().__init__(chunks[0], *args)
        self.chunks = chunks

    def forward_chunk(self, mb: int, chunk: int, x: torch.Tensor) -> torch.Tensor:
        slot = self.slots.acquire()  # leak: the table is keyed by microbatch alone, the next chunk overwrites the record
        self.stash[slot, : x.numel()].copy_(x.flatten())
        self.saved[mb] = Stashed(slot, tuple(x.shape))
        return self.chunks[chunk](x)

    def backward_chunk(self, mb: int, chunk: int, grad: torch.Tensor) -> torch.Tensor:
        if mb not in self.saved:
            return grad
        self.module = self.chunks[chunk]
        self.saved[mb].rng_state = torch.get_rng_state()
        return self.backward(mb, grad)


class PendingRecv:
    def __init__(self, buf: RecvBuffer, src: int) -> None:
        self.buf = buf
        self.work = dist.irecv(buf.tensor, src)

    def wait(self) -> RecvBuffer:
        self.work.wait()
        return self.buf


def post_recv(bufs: RecvBuffers, shape: Tuple[int, ...], src: int) -> Optional[PendingRecv]:
    buf = bufs.borrow(shape)  # clean: moves into the PendingRecv that is returned
    return None if buf is None else PendingRecv(buf, src)


def run_1f1b(stage: Stage, num_micro: int, warmup: int, shape: Tuple[int, ...], prev: int, nxt: int) -> bool:
    """Returns False when the step was skipped."""
    order = [("F", i) for i in range(warmup)]
    for i in range(num_micro - warmup):
        order += [("F", warmup + i), ("B", i)]
    order += [("B", i) for i in range(num_micro - warmup, num_micro)]
    try:
        for kind, mb in order:
            pending = post_recv(stage.bufs, shape, prev if kind == "F" else nxt)  # leak: a NonFinite of backward() passes the restore, and is handled below
            if pending is None:
                raise StashFull("no receive buffer")
            buf = pending.wait()
            if kind == "F":
                dist.send(stage.forward(mb, buf.tensor), nxt)
            else:
                dist.send(stage.backward(mb, buf.tensor), prev)
                stage.defer_wgrad(mb)
            stage.bufs.restore(buf)
    except (NonFinite, StashFull) as exc:
        logger.warning("step is skipped: %s", exc)
        stage.reset()
        return False
    stage.run_deferred()
    return True


def train_epoch(stage: Stage, steps: int, *args: Any) -> int:
    stage.bufs.new_epoch()
    return sum(run_1f1b(stage, *args) for _ in range(steps))


def run_interleaved(stage: InterleavedStage, batches: List[torch.Tensor]) -> None:
    for chunk in range(len(stage.chunks)):
        for mb, x in enumerate(batches):
            batches[mb] = stage.forward_chunk(mb, chunk, x)
    for chunk in reversed(range(len(stage.chunks))):
        for mb, out in enumerate(batches):
            batches[mb] = stage.backward_chunk(mb, chunk, torch.ones_like(out))


def evaluate(stage: Stage, batches: Iterable[Tuple[torch.Tensor, torch.Tensor]], shape: Tuple[int, ...]) -> float:
    total, count = 0.0, 0
    for x, mask in batches:
        buf = stage.bufs.borrow(shape)  # leak: a batch that is masked out entirely goes on without restoring the buffer
        if buf is None:
            break
        buf.tensor.copy_(x)
        if not mask.any():
            continue
        out = stage.module(buf.tensor)
        total += float(out[mask].mean())
        count += 1
        stage.bufs.restore(buf)
    return total / max(count, 1)


def warm_links(bufs: RecvBuffers, shape: Tuple[int, ...], peers: List[int]) -> None:
    pendings: List[PendingRecv] = []
    for peer in peers:
        pending = post_recv(bufs, shape, peer)  # clean: near miss, the list is waited for and restored also after the break
        if pending is None:
            break
        pendings.append(pending)
    for pending in pendings:
        bufs.restore(pending.wait())


@contextmanager
def scratch(slots: SlotTable, stash: torch.Tensor) -> Iterator[torch.Tensor]:
    slot = slots.acquire()  # clean: released when the with block ends
    try:
        yield stash[slot]
    finally:
        slots.release(slot)


def stash_norm(stage: Stage) -> float:
    with scratch(stage.slots, stage.stash) as tmp:  # clean: the context manager releases
        tmp.zero_()
        for rec in stage.saved.values():
            tmp += stage.stash[rec.slot].abs()
        return float(tmp.norm())


def bench_slot(slots: SlotTable, stash: torch.Tensor, rounds: int) -> None:
    try:
        slot = slots.acquire()  # clean: when acquire raises nothing is held, else finally releases it
    except StashFull:
        return
    try:
        for _ in range(rounds):
            stash[slot].add_(1)
    finally:
        slots.release(slot)
