from __future__ import annotations

import torch

from .batcher import Batcher, Job
from .slots import GpuSlots, Slot
from .store import AdapterStore, PinnedChunk, PinnedHeap


class AdapterServer:
    def __init__(self, heap: PinnedHeap, slots: GpuSlots, width: int = 8) -> None:
        self.heap = heap
        self.store = AdapterStore(heap)
        self.slots = slots
        self.batcher = Batcher(slots, width)
        self.warm: dict[str, Slot] = {}
        self.uploads: dict[str, PinnedChunk] = {}

    def step(self) -> int:
        done = 0
        for job in self.batcher.form():
            job.out.append(f"t{len(job.out)}")
            if len(job.out) >= job.max_new:
                self.batcher.retire(job)
                done += 1
        return done

    def keep_warm(self, name: str) -> bool:
        if name in self.warm:
            return True
        slot = self.slots.enlist(name)  # clean: near miss, kept in warm on purpose until cool_down
        if slot is None:
            return False
        self.warm[name] = slot
        return True

    def cool_down(self, keep: set[str]) -> None:
        for name in list(self.warm):
            if name not in keep:
                self.slots.discharge(self.warm.pop(name))

    def begin_upload(self, name: str) -> bool:
        if name in self.uploads:
            return False
        chunk = self.heap.rent()  # leak: finish_upload pops the chunk and rejects bad data without unrenting
        if chunk is None:
            return False
        self.uploads[name] = chunk
        return True

    def finish_upload(self, name: str, data: torch.Tensor) -> bool:
        chunk = self.uploads.pop(name, None)
        if chunk is None:
            return False
        if data.numel() > chunk.tensor.numel() or not bool(torch.isfinite(data).all()):
            return False
        chunk.tensor[: data.numel()].copy_(data.flatten())
        ok = self.store.put(name, [chunk.tensor[: data.numel()]])
        self.heap.unrent(chunk)
        return ok

    def cancel_upload(self, name: str) -> None:
        chunk = self.uploads.pop(name, None)
        if chunk is not None:
            self.heap.unrent(chunk)

    def submit(self, jobs: list[Job]) -> None:
        known = set(self.store.names())
        for job in jobs:
            if job.adapter is not None and job.adapter not in known:
                continue
            self.batcher.push(job)

    def rank_slots(self, names: list[str]) -> list[int]:
        order: list[tuple[int, int]] = []
        held: list[Slot] = []
        for name in names:
            slot = self.slots.enlist(name)  # clean: near miss, everything in held is discharged after the loop
            if slot is None:
                break
            held.append(slot)
            order.append((slot.stamp, slot.index))
        for slot in held:
            self.slots.discharge(slot)
        return [i for _, i in sorted(order)]
