"""Asynchronous sharded checkpointing through a ring of pinned staging slots."""
from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass
from typing import BinaryIO, Mapping, Optional

import torch


@dataclass
class StagingSlot:
    index: int
    host: torch.Tensor
    nbytes: int = 0


class StagingRing:
    def __init__(self, slots: int, nbytes: int) -> None:
        self.slot_bytes = nbytes
        self._ready: queue.SimpleQueue[StagingSlot] = queue.SimpleQueue()
        for i in range(slots):
            self._ready.put(StagingSlot(i, torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)))

    def claim(self, timeout: Optional[float] = None) -> Optional[StagingSlot]:
        try:
            return self._ready.get(timeout=timeout)
        except queue.Empty:
            return None

    def relinquish(self, slot: StagingSlot) -> None:
        slot.nbytes = 0
        self._ready.put(slot)


class ShardWriter:
    """Open files of one checkpoint directory."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._files: dict[str, BinaryIO] = {}

    def open_shard(self, name: str) -> BinaryIO:
        handle = open(os.path.join(self.root, name + ".tmp"), "wb")  # clean: handed to the caller and closed by seal_shard
        self._files[name] = handle
        return handle

    def seal_shard(self, name: str) -> None:
        handle = self._files.pop(name)
        handle.flush()
        os.fsync(handle.fileno())
        handle.close()
        os.replace(os.path.join(self.root, name + ".tmp"), os.path.join(self.root, name))

    def discard_shard(self, name: str) -> None:
        self._files.pop(name).close()
        os.unlink(os.path.join(self.root, name + ".tmp"))


def stage(slot: StagingSlot, tensor: torch.Tensor) -> None:
    flat = tensor.detach().contiguous().view(torch.uint8).view(-1)
    slot.nbytes = flat.numel()
    slot.host[: slot.nbytes].copy_(flat, non_blocking=True)


class AsyncCheckpointer:
    def __init__(self, ring: StagingRing, writer: ShardWriter) -> None:
        self.ring = ring
        self.writer = writer
        self.jobs: queue.Queue[Optional[tuple[str, StagingSlot]]] = queue.Queue()
        self.failed: list[tuple[str, StagingSlot]] = []
        self.rng_slot: Optional[StagingSlot] = None
        self.thread = threading.Thread(target=self._drain, daemon=True)

    def save(self, state: Mapping[str, torch.Tensor]) -> int:
        submitted = 0
        for name, tensor in state.items():
            slot = self.ring.claim(timeout=30.0)  # clean: near miss, handed to the drain thread through jobs, which relinquishes or keeps it in failed for retry_failed
            if slot is None:
                break
            stage(slot, tensor)
            self.jobs.put((name, slot))
            submitted += 1
        return submitted

    def save_filtered(self, state: Mapping[str, torch.Tensor], prefix: str) -> int:
        submitted = 0
        for name, tensor in state.items():
            slot = self.ring.claim(timeout=30.0)  # leak: the continue for names outside the prefix drops the slot
            if slot is None:
                break
            if not name.startswith(prefix):
                continue
            stage(slot, tensor)
            self.jobs.put((name, slot))
            submitted += 1
        return submitted

    def _drain(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            name, slot = job
            handle = self.writer.open_shard(name)  # clean: near miss, sealed, or discarded in the handler
            try:
                handle.write(slot.host[: slot.nbytes].numpy().data)
            except OSError:
                self.writer.discard_shard(name)
                self.failed.append((name, slot))
                continue
            self.writer.seal_shard(name)
            self.ring.relinquish(slot)

    def retry_failed(self) -> int:
        pending, self.failed = self.failed, []
        for job in pending:
            self.jobs.put(job)
        return len(pending)

    def save_metadata(self, payload: bytes, step: int) -> bool:
        name = f"meta-{step:08d}"
        handle = self.writer.open_shard(name)  # leak: an OSError is answered with False, the shard is neither sealed nor discarded
        try:
            handle.write(payload)
        except OSError:
            return False
        self.writer.seal_shard(name)
        return True

    def save_rng(self, rng: torch.Tensor) -> bool:
        if self.rng_slot is None:
            self.rng_slot = self.ring.claim()  # clean: near miss, taken once and relinquished in stop
        if self.rng_slot is None:
            return False
        stage(self.rng_slot, rng)
        handle = self.writer.open_shard("rng")  # clean: sealed below
        handle.write(self.rng_slot.host[: self.rng_slot.nbytes].numpy().data)
        self.writer.seal_shard("rng")
        return True

    def save_pair(self, model: torch.Tensor, ema: torch.Tensor, step: int) -> bool:
        first = self.ring.claim(timeout=5.0)  # leak: kept out when no second slot comes in time
        if first is None:
            return False
        second = self.ring.claim(timeout=5.0)  # clean: handed to the drain thread
        if second is None:
            return False
        stage(first, model)
        stage(second, ema)
        self.jobs.put((f"model-{step}", first))
        self.jobs.put((f"ema-{step}", second))
        return True

    def snapshot(self, tensor: torch.Tensor) -> Optional[torch.Tensor]:
        slot = self._claim_sized(tensor.numel() * tensor.element_size())  # leak: the caller copies the bytes out and drops the slot
        if slot is None:
            return None
        stage(slot, tensor)
        torch.cuda.current_stream().synchronize()
        return slot.host[: slot.nbytes].clone()

    def digest(self, tensor: torch.Tensor) -> int:
        slot = self._claim_sized(tensor.numel() * tensor.element_size())  # clean: near miss, relinquished after the sum
        if slot is None:
            return 0
        stage(slot, tensor)
        torch.cuda.current_stream().synchronize()
        value = int(slot.host[: slot.nbytes].sum())
        self.ring.relinquish(slot)
        return value

    def _claim_sized(self, nbytes: int) -> Optional[StagingSlot]:
        slot = self.ring.claim(timeout=1.0)  # clean: near miss, relinquished if too small, else handed to the caller
        if slot is not None and nbytes > slot.host.numel():
            self.ring.relinquish(slot)
            return None
        return slot

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.jobs.put(None)
        self.thread.join()
        for _, slot in self.failed:
            self.ring.relinquish(slot)
        self.failed.clear()
        if self.rng_slot is not None:
            self.ring.relinquish(self.rng_slot)
            self.rng_slot = None
