"""Shared-memory slabs between the preprocessing processes and the trainer.

A SlabBoard is one segment cut into equal slabs behind a bitmap. A SegmentRegistry
maps named segments and counts the attachments to each.
"""
from __future__ import annotations

import threading
from multiprocessing import shared_memory
from typing import Iterator, NamedTuple, Optional, Sequence

import numpy as np
import torch


class Slab(NamedTuple):
    board: "SlabBoard"
    index: int

    def view(self, shape: Sequence[int], dtype=np.float32) -> torch.Tensor:
        arr = np.ndarray(tuple(shape), dtype, self.board.shm.buf, self.index * self.board.slab_bytes)
        return torch.from_numpy(arr)


class SlabBoard:
    def __init__(self, slabs: int, slab_bytes: int):
        self.slab_bytes = slab_bytes
        self.count = slabs
        self.shm = shared_memory.SharedMemory(create=True, size=slabs * slab_bytes)
        self._bits = 0
        self._mu = threading.Lock()

    def claim_slab(self) -> Optional[Slab]:
        with self._mu:
            for i in range(self.count):
                if not self._bits >> i & 1:
                    self._bits |= 1 << i
                    return Slab(self, i)
        return None

    def claim_run(self, n: int) -> Optional[list[Slab]]:
        """n neighbouring slabs, or None."""
        want = (1 << n) - 1
        with self._mu:
            for i in range(self.count - n + 1):
                if self._bits & want << i == 0:
                    self._bits |= want << i
                    return [Slab(self, j) for j in range(i, i + n)]
        return None

    def clear_slab(self, slab: Slab) -> None:
        with self._mu:
            self._bits &= ~(1 << slab.index)

    def destroy(self) -> None:
        self.shm.close()
        self.shm.unlink()


class SegmentRegistry:
    """attach() maps a segment on first use; the last detach() unmaps it."""

    def __init__(self) -> None:
        self._segs: dict[str, shared_memory.SharedMemory] = {}
        self._refs: dict[str, int] = {}
        self._mu = threading.RLock()

    def attach(self, name: str) -> memoryview:
        with self._mu:
            seg = self._segs.get(name)
            if seg is None:
                seg = shared_memory.SharedMemory(name=name)
                self._segs[name] = seg
                self._refs[name] = 0
            self._refs[name] += 1
            return seg.buf

    def detach(self, name: str) -> None:
        with self._mu:
            self._refs[name] -= 1
            if self._refs[name] == 0:
                del self._refs[name]
                self._segs.pop(name).close()


class PairedBoard:
    """Images and labels live on two boards and travel together."""

    def __init__(self, images: SlabBoard, labels: SlabBoard):
        self.images, self.labels = images, labels

    def claim_pair(self) -> Optional[tuple[Slab, Slab]]:
        img = self.images.claim_slab()  # leak: not cleared when the label board is full
        lab = self.labels.claim_slab()  # leak: not cleared when only the image board is full
        if img is None or lab is None:
            return None
        return img, lab

    def claim_pair_checked(self) -> Optional[tuple[Slab, Slab]]:
        img = self.images.claim_slab()  # clean: cleared when there is no label slab, else returned
        if img is None:
            return None
        lab = self.labels.claim_slab()  # clean: returned as half of the pair
        if lab is None:
            self.images.clear_slab(img)
            return None
        return img, lab

    def clear_pair(self, pair: tuple[Slab, Slab]) -> None:
        self.images.clear_slab(pair[0])
        self.labels.clear_slab(pair[1])


class OverflowBoard:
    """Tries the near board, then the far one."""

    def __init__(self, near: SlabBoard, far: SlabBoard):
        self.near, self.far = near, far

    def claim_slab(self) -> Optional[Slab]:
        return self.near.claim_slab() or self.far.claim_slab()  # clean: near miss, the second is only asked when the first gave None

    def clear_slab(self, slab: Slab) -> None:
        slab.board.clear_slab(slab)


class Producer:
    def __init__(self, pair: PairedBoard, ring: list, capacity: int):
        self.pair = pair
        self.ring = ring
        self.capacity = capacity
        self.parked: Optional[Slab] = None

    def publish(self, image: torch.Tensor, label: torch.Tensor) -> bool:
        got = self.pair.claim_pair_checked()  # clean: moved into the ring or cleared when it is full
        if got is None:
            return False
        if len(self.ring) >= self.capacity:
            self.pair.clear_pair(got)
            return False
        got[0].view(image.shape).copy_(image)
        got[1].view(label.shape).copy_(label)
        self.ring.append(got)
        return True

    def publish_batch(self, items: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
        sent = 0
        for image, label in items:
            got = self.pair.claim_pair_checked()  # leak: pair of an image too large for a slab is skipped over
            if got is None:
                break
            if image.numel() * 4 > self.pair.images.slab_bytes:
                continue
            got[0].view(image.shape).copy_(image)
            got[1].view(label.shape).copy_(label)
            self.ring.append(got)
            sent += 1
        return sent

    def park(self) -> bool:
        if self.parked is not None:
            return True
        self.parked = self.pair.images.claim_slab()  # clean: near miss, only taken when nothing is parked, unpark() clears it
        return self.parked is not None

    def unpark(self) -> None:
        slab, self.parked = self.parked, None
        if slab is not None:
            self.pair.images.clear_slab(slab)


def consume(ring: list, pair: PairedBoard) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while ring:
        got = ring.pop(0)  # clean: cleared in finally even when the consumer stops early
        try:
            yield got[0].view((3, 224, 224)), got[1].view((1,))
        finally:
            pair.clear_pair(got)


def normalise_in(board: SlabBoard, x: torch.Tensor) -> Optional[torch.Tensor]:
    """Answers a view of a slab that holds the normalised x."""
    slab = board.claim_slab()  # leak: the view is returned but the slab that it lies in is forgotten
    if slab is None:
        return None
    out = slab.view(x.shape)
    out.copy_((x - x.mean()) / (x.std() + 1e-6))
    return out


def checksum(board: SlabBoard, x: torch.Tensor) -> float:
    slab = board.claim_slab()  # clean: near miss, early value without a slab, cleared otherwise
    if slab is None:
        return float(x.double().sum())
    tmp = slab.view(x.shape)
    tmp.copy_(x)
    total = float(tmp.double().sum())
    board.clear_slab(slab)
    return total


def concat_run(board: SlabBoard, parts: list[torch.Tensor]) -> Optional[torch.Tensor]:
    run = board.claim_run(len(parts))  # clean: every slab of the run is cleared after the copy
    if run is None:
        return None
    try:
        for slab, part in zip(run, parts):
            slab.view(part.shape).copy_(part)
        return torch.cat([s.view(p.shape) for s, p in zip(run, parts)]).clone()
    finally:
        for slab in run:
            board.clear_slab(slab)


class SharedWeights:
    """Weights published by the trainer, attached by name per version."""

    def __init__(self, registry: SegmentRegistry):
        self.registry = registry
        self.current: Optional[str] = None
        self.buf: Optional[memoryview] = None

    def switch(self, name: str) -> None:
        buf = self.registry.attach(name)  # clean: near miss, the former version is detached, close() detaches the last
        former, self.current, self.buf = self.current, name, buf
        if former is not None:
            self.registry.detach(former)

    def peek_header(self, name: str) -> Optional[bytes]:
        buf = self.registry.attach(name)  # leak: not detached when the magic is wrong
        if bytes(buf[:4]) != b"WGT1":
            return None
        header = bytes(buf[4:64])
        self.registry.detach(name)
        return header

    def size_of(self, name: str) -> int:
        size = len(self.registry.attach(name))  # clean: detached by name on the next line
        self.registry.detach(name)
        return size

    def close(self) -> None:
        if self.current is not None:
            self.registry.detach(self.current)
            self.current = self.buf = None
