"""Prefetching loader: worker threads decode samples into slots of a pinned staging ring.

A slot is claimed by a worker, travels through the ready queue inside a Staged record, and is released by the
consumer after the copy to the device has been enqueued.
"""
from __future__ import annotations

import queue
import random
import threading
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch


class StagingRing:
    def __init__(self, slots: int, slot_bytes: int):
        self._mem = torch.empty(slots, slot_bytes, dtype=torch.uint8).pin_memory()
        self._busy = [False] * slots
        self._cond = threading.Condition()
        self.closed = False

    def claim_slot(self, timeout: Optional[float] = None) -> int:
        """Index of a slot, or -1 on timeout and after close."""
        with self._cond:
            ok = self._cond.wait_for(lambda: self.closed or not all(self._busy), timeout)
            if not ok or self.closed:
                return -1
            i = self._busy.index(False)
            self._busy[i] = True
            return i

    def release_slot(self, i: int) -> None:
        with self._cond:
            self._busy[i] = False
            self._cond.notify()

    def view(self, i: int) -> torch.Tensor:
        return self._mem[i]

    def close(self) -> None:
        with self._cond:
            self.closed = True
            self._cond.notify_all()


@dataclass
class Staged:
    slot: int
    nbytes: int
    meta: Dict[str, Any]


class DecodeWorker(threading.Thread):
    def __init__(self, ring: StagingRing, todo: "queue.Queue", ready: "queue.Queue", decode: Callable):
        super().__init__(daemon=True)
        self.ring = ring
        self.todo = todo
        self.ready = ready
        self.decode = decode
        self.rejected = 0

    def run(self) -> None:
        while True:
            item = self.todo.get()
            if item is None:
                break
            slot = self.ring.claim_slot()  # leak: an undecodable sample goes on without releasing the slot
            if slot < 0:
                break
            nbytes = self.decode(item, self.ring.view(slot))
            if nbytes == 0:
                self.rejected += 1
                continue
            self.ready.put(Staged(slot, nbytes, {"key": item}))
        self.ready.put(None)


class AugmentWorker(threading.Thread):
    """Second stage: reads a staged sample, writes the augmented one into a slot of its own."""

    def __init__(self, ring: StagingRing, source: "queue.Queue", sink: "queue.Queue", p: float):
        super().__init__(daemon=True)
        self.ring = ring
        self.source = source
        self.sink = sink
        self.p = p

    def run(self) -> None:
        while True:
            staged = self.source.get()
            if staged is None:
                break
            if random.random() > self.p:
                self.sink.put(staged)
                continue
            out = self.ring.claim_slot()  # clean: near miss, goes to the sink in a record of its own
            if out < 0:
                self.ring.release_slot(staged.slot)
                break
            self.ring.view(out).copy_(self.ring.view(staged.slot).flip(0))
            self.ring.release_slot(staged.slot)
            self.sink.put(Staged(out, staged.nbytes, dict(staged.meta, flipped=True)))
        self.sink.put(None)


class PrefetchLoader:
    def __init__(self, ring: StagingRing, ready: "queue.Queue", workers: int, device: str):
        self.ring = ring
        self.ready = ready
        self.live = workers
        self.device = device

    def take(self) -> Optional[Staged]:
        """Next staged record; its slot belongs to the caller."""
        while self.live:
            staged = self.ready.get()
            if staged is None:
                self.live -= 1
                continue
            return staged
        return None

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, Dict[str, Any]]]:
        while True:
            staged = self.take()  # clean: released after the copy, or None
            if staged is None:
                return
            x = self.ring.view(staged.slot)[: staged.nbytes].to(self.device, copy=True)
            self.ring.release_slot(staged.slot)
            yield x, staged.meta

    def batches(self, size: int) -> Iterator[torch.Tensor]:
        """Full batches only; samples of one length are assumed."""
        held: List[Staged] = []
        while True:
            staged = self.take()  # leak: an incomplete last batch in held is dropped at the return
            if staged is None:
                return
            held.append(staged)
            if len(held) == size:
                batch = torch.stack([self.ring.view(s.slot)[: s.nbytes].clone() for s in held])
                for s in held:
                    self.ring.release_slot(s.slot)
                held = []
                yield batch.to(self.device)

    def ragged_batches(self, size: int) -> Iterator[List[torch.Tensor]]:
        held: List[Staged] = []
        done = False
        while not done:
            staged = self.take()  # clean: near miss, the rest in held is flushed when done
            if staged is None:
                done = True
            else:
                held.append(staged)
            if held and (done or len(held) == size):
                out = [self.ring.view(s.slot)[: s.nbytes].to(self.device, copy=True) for s in held]
                while held:
                    self.ring.release_slot(held.pop().slot)
                yield out

    def skip(self, n: int) -> int:
        """Fast-forwards after a restart."""
        skipped = 0
        while skipped < n:
            staged = self.take()  # leak: counted and overwritten, its slot stays busy
            if staged is None:
                break
            skipped += 1
        return skipped

    def skip_until(self, key: str) -> Optional[Staged]:
        """Drops samples up to the one with the key, which the caller gets."""
        while True:
            staged = self.take()  # clean: released, or returned to the caller
            if staged is None or staged.meta["key"] == key:
                return staged
            self.ring.release_slot(staged.slot)

    def inspect(self, key: str) -> Dict[str, Any]:
        staged = self.skip_until(key)  # leak: only its metadata is used
        if staged is None:
            return {}
        return dict(staged.meta, nbytes=staged.nbytes)

    def shutdown(self) -> None:
        self.ring.close()
        while not self.ready.empty():
            staged = self.ready.get_nowait()
            if staged is not None:
                self.ring.release_slot(staged.slot)


def fill_inline(ring: StagingRing, items, decode: Callable, budget: int) -> List[Staged]:
    """Single-process mode: stages up to `budget` samples and hands them out."""
    out: List[Staged] = []
    for item in items:
        if len(out) == budget:
            break
        slot = ring.claim_slot(timeout=0.0)  # clean: into the list, released, or -1
        if slot < 0:
            break
        nbytes = decode(item, ring.view(slot))
        if not nbytes:
            ring.release_slot(slot)
            continue
        out.append(Staged(slot, nbytes, {"key": item}))
    return out


def measure_decode(ring: StagingRing, items, decode: Callable) -> float:
    staged = fill_inline(ring, items, decode, 32)  # leak: summed up, never released
    total = sum(s.nbytes for s in staged)
    return total / max(1, len(staged))
