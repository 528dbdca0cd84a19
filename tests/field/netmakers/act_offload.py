"""Activation offload to pinned host memory, driven by saved_tensors_hooks.

Large activations are copied to page-locked buffers on a side stream during
forward and brought back just ahead of the backward that needs them.
"""
from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)

MIN_OFFLOAD_BYTES = 1 << 20


class PinnedSlab:
    """Page-locked host buffers binned by power-of-two size. checkout() may say None."""

    def __init__(self, limit_bytes: int) -> None:
        self._bins: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._limit = limit_bytes
        self._outstanding = 0
        self._lock = threading.Lock()

    @staticmethod
    def bin_for(nbytes: int) -> int:
        return 1 << max(12, (nbytes - 1).bit_length())

    def checkout(self, nbytes: int) -> torch.Tensor | None:
        size = self.bin_for(nbytes)
        with self._lock:
            if self._outstanding + size > self._limit:
                return None
            self._outstanding += size
            if self._bins[size]:
                return self._bins[size].pop()  # clean: handed to the caller
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def checkin(self, buf: torch.Tensor) -> None:
        with self._lock:
            self._outstanding -= buf.numel()
            self._bins[buf.numel()].append(buf)

    def checkin_all(self, bufs) -> None:
        for b in bufs:
            self.checkin(b)


class EventRack:
    """Reusable CUDA events; borrow() never fails."""

    def __init__(self) -> None:
        self._idle: list[torch.cuda.Event] = []

    def borrow(self) -> torch.cuda.Event:
        if self._idle:
            return self._idle.pop()  # clean: handed to the caller
        return torch.cuda.Event()

    def put_back(self, ev: torch.cuda.Event) -> None:
        self._idle.append(ev)


@dataclass
class HostCopy:
    host: torch.Tensor
    ready: torch.cuda.Event
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class OffloadSession:
    """One forward/backward pair. Keys handed to autograd index self._live."""

    def __init__(self, slab: PinnedSlab, events: EventRack, stream: torch.cuda.Stream) -> None:
        self.slab = slab
        self.events = events
        self.stream = stream
        self._ids = itertools.count()
        self._live: dict[int, HostCopy] = {}

    def _copy_out(self, t: torch.Tensor, host: torch.Tensor) -> None:
        view = host[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            view.copy_(t, non_blocking=True)

    def pack(self, t: torch.Tensor):
        nbytes = t.numel() * t.element_size()
        if nbytes < MIN_OFFLOAD_BYTES:
            return t
        host = self.slab.checkout(nbytes)  # leak: kept by nobody when the tensor is a view and pack returns it as is
        if host is None:
            return t
        if t._base is not None:
            return t
        ev = self.events.borrow()  # clean: near miss, moved into self._live, emptied by unpack and abort
        self._copy_out(t, host)
        ev.record(self.stream)
        key = next(self._ids)
        self._live[key] = HostCopy(host, ev, t.shape, t.dtype, t.device)
        return key

    def pack_quantized(self, t: torch.Tensor, scale: torch.Tensor):
        host = self.slab.checkout(t.numel())  # clean: None-checked and then owned by self._live
        if host is None:
            log.debug("slab full, keeping %s on device", tuple(t.shape))
            return t
        q = torch.clamp(t / scale, -127, 127).to(torch.int8)
        self._copy_out(q, host)
        ev = self.events.borrow()  # clean: stored in self._live with the host copy
        ev.record(self.stream)
        key = next(self._ids)
        self._live[key] = HostCopy(host, ev, q.shape, q.dtype, q.device)
        return key

    def unpack(self, handle):
        if isinstance(handle, torch.Tensor):
            return handle
        copy = self._live.pop(handle)
        copy.ready.synchronize()
        n = copy.shape.numel() * copy.dtype.itemsize
        out = copy.host[:n].view(copy.dtype).view(copy.shape).to(copy.device)
        self.slab.checkin(copy.host)
        self.events.put_back(copy.ready)
        return out

    def abort(self) -> None:
        while self._live:
            _, copy = self._live.popitem()
            copy.ready.synchronize()
            self.slab.checkin(copy.host)
            self.events.put_back(copy.ready)

    def measure_bandwidth(self, nbytes: int) -> float:
        start = self.events.borrow()  # clean: put back below
        end = self.events.borrow()  # leak: only start is put back when there is no host memory
        host = self.slab.checkout(nbytes)  # clean: checked in after the timing
        if host is None:
            self.events.put_back(start)
            return 0.0
        dev = torch.empty(host.numel(), dtype=torch.uint8, device="cuda")
        start.record(self.stream)
        self._copy_out(dev, host)
        end.record(self.stream)
        end.synchronize()
        ms = start.elapsed_time(end)
        self.slab.checkin(host)
        self.events.put_back(start)
        self.events.put_back(end)
        return host.numel() / max(ms, 1e-6) / 1e6

    def spill_rng(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        for s in states:
            buf = self.slab.checkout(s.numel())  # clean: near miss, on None the collected ones go back through checkin_all
            if buf is None:
                self.slab.checkin_all(kept)
                return []
            buf[: s.numel()].copy_(s)
            kept.append(buf)
        return kept

    def restore_rng(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        saved = self.spill_rng(states)  # clean: all checked in after the clones are made
        out = [b[: s.numel()].clone() for b, s in zip(saved, states)]
        self.slab.checkin_all(saved)
        return out

    def dump_first(self, states: list[torch.Tensor], path: str) -> None:
        saved = self.spill_rng(states)  # leak: only the first buffer is checked in, the rest of the list is dropped
        if not saved:
            return
        torch.save(saved[0][: states[0].numel()].clone(), path)
        self.slab.checkin(saved[0])


class LayerPrefetcher:
    """Keeps at most one staged weight shard ahead of the layer being run."""

    def __init__(self, slab: PinnedSlab) -> None:
        self.slab = slab
        self._staged: torch.Tensor | None = None
        self._staged_layer = -1
        self._norm: torch.Tensor | None = None

    def stage(self, layer: int, shard: torch.Tensor) -> bool:
        buf = self.slab.checkout(shard.numel() * shard.element_size())  # leak: rebinding self._staged loses the previously staged shard
        if buf is None:
            return False
        buf[: shard.numel() * shard.element_size()].copy_(shard.view(torch.uint8).flatten())
        self._staged = buf
        self._staged_layer = layer
        return True

    def stage_norm(self, weight: torch.Tensor) -> bool:
        old = self._norm
        buf = self.slab.checkout(weight.numel() * weight.element_size())  # clean: near miss, the old one is checked in before self._norm is rebound
        if buf is None:
            return False
        if old is not None:
            self.slab.checkin(old)
        buf[: weight.numel() * weight.element_size()].copy_(weight.view(torch.uint8).flatten())
        self._norm = buf
        return True

    def take_for(self, layer: int, numel: int) -> torch.Tensor | None:
        if self._staged is None or self._staged_layer != layer:
            return None
        out = self._staged[:numel].cuda()
        self.slab.checkin(self._staged)
        self._staged = None
        return out

    def close(self) -> None:
        for buf in (self._staged, self._norm):
            if buf is not None:
                self.slab.checkin(buf)
        self._staged = self._norm = None


def probe_layout(slab: PinnedSlab, sizes: list[int]) -> dict[int, int]:
    """Address of one buffer per size class, for the NUMA placement report."""
    where: dict[int, int] = {}
    for n in sizes:
        buf = slab.checkout(n)  # leak: continue on an already seen class skips the checkin
        if buf is None:
            break
        if buf.numel() in where:
            continue
        where[buf.numel()] = buf.data_ptr()
        slab.checkin(buf)
    return where
