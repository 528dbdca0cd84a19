"""Pinned host staging for the tokenised-batch loader.

Samples arrive on worker threads as CPU tensors, are packed into page-locked
slabs and copied to the device on a side stream.  Slabs come back once the copy
event has fired.
"""
from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)


class PinnedSlab:
    __slots__ = ("data", "order", "stamp")

    def __init__(self, order: int, pin: bool):
        self.data = torch.empty(1 << order, dtype=torch.uint8, pin_memory=pin)
        self.order = order
        self.stamp = 0


@dataclass
class Sample:
    key: str
    tokens: torch.Tensor
    mask: torch.Tensor
    corrupt: bool = False

    @property
    def nbytes(self) -> int:
        return self.tokens.numel() * self.tokens.element_size()


class SlabRing:
    """A fixed number of pinned slabs for every size order."""

    def __init__(self, orders, per_order: int, pin: bool = True, zero_limit: int = 24):
        self._free = {o: deque(PinnedSlab(o, pin) for _ in range(per_order)) for o in orders}
        self._cv = threading.Condition()
        self._zero_limit = zero_limit

    @staticmethod
    def _order_for(nbytes: int) -> int:
        return max(12, (nbytes - 1).bit_length())

    def lend(self, nbytes: int, block: bool = True):
        order = self._order_for(nbytes)
        with self._cv:
            while not self._free[order]:
                if not block:
                    return None
                self._cv.wait()
            slab = self._free[order].popleft()
            slab.stamp += 1
            return slab

    def giveback(self, slab: PinnedSlab) -> None:
        with self._cv:
            self._free[slab.order].append(slab)
            self._cv.notify()

    def lend_pair(self, first_bytes: int, second_bytes: int):
        first = self.lend(first_bytes)  # clean: given back when the second is missing, else handed to the caller
        second = self.lend(second_bytes, block=False)  # clean: handed to the caller in the pair
        if second is None:
            self.giveback(first)
            return None
        return first, second

    def lend_zeroed(self, nbytes: int):
        slab = self.lend(nbytes, block=False)  # leak: dropped when the slab is over the zero limit
        if slab is None:
            return None
        if slab.order > self._zero_limit:
            log.debug("slab of order %d is over the zeroing limit", slab.order)
            return None
        slab.data.zero_()
        return slab


@contextlib.contextmanager
def pinned_view(ring: SlabRing, nbytes: int):
    slab = ring.lend(nbytes)  # clean: given back in finally
    try:
        yield slab.data[:nbytes]
    finally:
        ring.giveback(slab)


class BatchStager:
    def __init__(self, ring: SlabRing, device: torch.device, depth: int = 4):
        self.ring = ring
        self.device = device
        self.depth = depth
        self.stream = torch.cuda.Stream(device)
        self.inflight: deque = deque()
        self.n_empty = 0
        self.n_corrupt = 0

    def stage(self, sample: Sample):
        slab = self.ring.lend(sample.nbytes)  # leak: an empty sample returns before the slab is queued
        view = slab.data[: sample.nbytes]
        if sample.tokens.numel() == 0:
            self.n_empty += 1
            return None
        view.copy_(sample.tokens.view(torch.uint8).flatten())
        return self._launch(slab, view)

    def _launch(self, slab: PinnedSlab, view: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            out = view.to(self.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        self.inflight.append((event, slab))
        return out

    def stage_pair(self, sample: Sample):
        mask_bytes = sample.mask.numel()
        pair = self.ring.lend_pair(sample.nbytes, mask_bytes)  # clean: near miss, _launch queues both in inflight, which reap() drains
        if pair is None:
            return None
        tok, mask = pair
        tok_view = tok.data[: sample.nbytes]
        mask_view = mask.data[:mask_bytes]
        tok_view.copy_(sample.tokens.view(torch.uint8).flatten())
        mask_view.copy_(sample.mask.view(torch.uint8).flatten())
        return self._launch(tok, tok_view), self._launch(mask, mask_view)

    def reap(self, wait: bool = False) -> int:
        done = 0
        while self.inflight:
            event, slab = self.inflight[0]
            if not event.query():
                if not wait:
                    break
                event.synchronize()
            self.inflight.popleft()
            self.ring.giveback(slab)
            done += 1
        return done

    def stage_many(self, samples):
        for sample in samples:
            if len(self.inflight) >= self.depth:
                self.reap(wait=True)
            slab = self.ring.lend(sample.nbytes)  # leak: continue on a corrupt sample skips the launch
            if sample.corrupt:
                self.n_corrupt += 1
                continue
            view = slab.data[: sample.nbytes]
            view.copy_(sample.tokens.view(torch.uint8).flatten())
            yield sample.key, self._launch(slab, view)

    def stage_filtered(self, samples, max_bytes: int):
        outs = []
        for sample in samples:
            if sample.nbytes > max_bytes:
                continue
            slab = self.ring.lend(sample.nbytes, block=False)  # clean: near miss, the only continue after it is the None case
            if slab is None:
                self.reap(wait=True)
                continue
            view = slab.data[: sample.nbytes]
            view.copy_(sample.tokens.view(torch.uint8).flatten())
            outs.append(self._launch(slab, view))
        return outs

    def _pack(self, tensors):
        total = sum(t.numel() * t.element_size() for t in tensors)
        slab = self.ring.lend(total)  # clean: handed to the caller
        at = 0
        for t in tensors:
            n = t.numel() * t.element_size()
            slab.data[at : at + n].copy_(t.view(torch.uint8).flatten())
            at += n
        return slab, total

    def upload_table(self, tensors) -> torch.Tensor:
        slab, total = self._pack(tensors)  # leak: copied to the device and dropped
        return slab.data[:total].to(self.device)

    def upload_table_async(self, tensors) -> torch.Tensor:
        slab, total = self._pack(tensors)  # clean: queued in inflight by _launch
        return self._launch(slab, slab.data[:total])

    def checksum(self, tensors) -> int:
        slab, total = self._pack(tensors)  # clean: given back in finally
        try:
            return int(slab.data[:total].to(torch.int64).sum())
        finally:
            self.ring.giveback(slab)

    def prewarm(self, sizes) -> int:
        touched = []
        for n in sizes:
            slab = self.ring.lend(n, block=False)  # clean: near miss, kept in touched and all given back below
            if slab is None:
                break
            slab.data[:1].fill_(0)
            touched.append(slab)
        for slab in touched:
            self.ring.giveback(slab)
        return len(touched)

    def digest(self, sample: Sample) -> bytes:
        with pinned_view(self.ring, sample.nbytes) as view:  # clean: context manager gives it back
            view.copy_(sample.tokens.view(torch.uint8).flatten())
            return bytes(view[:32].tolist())

    def close(self) -> None:
        self.reap(wait=True)


def upload_header(ring: SlabRing, header: torch.Tensor, device, scratch_bytes: int = 4096):
    """Copies the epoch header; falls back to a bigger slab when it does not fit."""
    slab = ring.lend(scratch_bytes)  # leak: rebinding to the bigger slab loses the small one
    need = header.numel() * header.element_size()
    if need > scratch_bytes:
        slab = ring.lend(need)  # clean: given back at the end
    slab.data[:need].copy_(header.view(torch.uint8).flatten())
    out = slab.data[:need].to(device)
    ring.giveback(slab)
    return out
