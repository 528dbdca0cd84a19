"""Host-to-device batch loader over a fixed set of pinned staging slabs."""
from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional

import torch
from torch import Tensor


class PinnedSlabs:
    """A fixed number of page-locked slabs; pin() gives None if every slab is taken."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._slabs = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for _ in range(count)]
        self._ready: Deque[int] = deque(range(count))
        self._mutex = threading.Lock()

    def pin(self) -> Optional[int]:
        with self._mutex:
            if not self._ready:
                return None
            slot = self._ready.popleft()  # clean: the slot number goes to the caller
            return slot

    def unpin(self, slot: int) -> None:
        with self._mutex:
            self._ready.append(slot)

    def slab(self, slot: int, sample: Tensor) -> Tensor:
        raw = self._slabs[slot][: sample.numel() * sample.element_size()]
        return raw.view(sample.dtype).view(sample.shape)

    def resize(self, nbytes: int) -> None:
        with self._mutex:
            kept: List[int] = []
            while self._ready:
                slot = self._ready.popleft()  # leak: slots whose slab is already large enough never get back into the ready queue
                if self._slabs[slot].numel() >= nbytes:
                    continue
                self._slabs[slot] = torch.empty(nbytes, dtype=torch.uint8)
                kept.append(slot)
            self._ready.extend(kept)


class StagedCopy:
    def __init__(self, slabs: PinnedSlabs, device: torch.device) -> None:
        self.slabs = slabs
        self.device = device

    def copy(self, t: Tensor) -> Tensor:
        slot = self.slabs.pin()  # clean: near miss, zero is a slot as well and the test is against None
        if slot is None:
            return t.to(self.device)
        staged = self.slabs.slab(slot, t)
        staged.copy_(t)
        out = staged.to(self.device, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self.slabs.unpin(slot)
        return out

    def checksum(self, t: Tensor) -> float:
        slot = self.slabs.pin()  # leak: half precision returns before unpin
        if slot is None:
            return float(t.double().sum())
        staged = self.slabs.slab(slot, t)
        staged.copy_(t)
        if t.dtype == torch.float16:
            return float(staged.float().sum())
        total = float(staged.double().sum())
        self.slabs.unpin(slot)
        return total

    def copy_many(self, tensors: Iterable[Tensor]) -> List[Tensor]:
        outs: List[Tensor] = []
        for t in tensors:
            slot = self.slabs.pin()  # leak: slot zero is falsy, so it is neither used nor unpinned
            if not slot:
                outs.append(t.to(self.device))
                continue
            staged = self.slabs.slab(slot, t)
            staged.copy_(t)
            outs.append(staged.to(self.device))
            self.slabs.unpin(slot)
        return outs

    def copy_batch(self, batch: Dict[str, Tensor]) -> Dict[str, Tensor]:
        slots: Dict[str, int] = {}
        out: Dict[str, Tensor] = {}
        for name, t in batch.items():
            slot = self.slabs.pin()  # clean: near miss, kept in the dict and every entry is unpinned below
            if slot is None:
                out[name] = t.to(self.device)
                continue
            slots[name] = slot
            staged = self.slabs.slab(slot, t)
            staged.copy_(t)
            out[name] = staged.to(self.device, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        for slot in slots.values():
            self.slabs.unpin(slot)
        return out


class PrefetchLoader:
    """Runs the collate function on a worker and keeps at most `depth` batches ahead."""

    def __init__(self, source: Iterable[Any], collate: Callable[[Any], Dict[str, Tensor]], stager: StagedCopy, depth: int = 2):
        self.source = source
        self.collate = collate
        self.stager = stager
        self._credits = threading.BoundedSemaphore(depth)
        self._queue: "queue.Queue[Optional[Dict[str, Tensor]]]" = queue.Queue()
        self._stop = threading.Event()
        self._gate = threading.Lock()
        self.skipped = 0

    def _worker(self) -> None:
        for item in self.source:
            self._credits.acquire()  # clean: near miss, the consumer releases one credit for each queued batch and the stop branch releases its own
            if self._stop.is_set():
                self._credits.release()
                break
            self._queue.put(self.stager.copy_batch(self.collate(item)))
        self._queue.put(None)

    def _filtering_worker(self, keep: Callable[[Any], bool]) -> None:
        for item in self.source:
            self._credits.acquire()  # leak: items rejected by the filter continue with the credit taken
            if not keep(item):
                self.skipped += 1
                continue
            self._queue.put(self.stager.copy_batch(self.collate(item)))
        self._queue.put(None)

    def iterate(self, keep: Optional[Callable[[Any], bool]] = None) -> Iterator[Dict[str, Tensor]]:
        if keep is None:
            thread = threading.Thread(target=self._worker, daemon=True)
        else:
            thread = threading.Thread(target=self._filtering_worker, args=(keep,), daemon=True)
        thread.start()
        while True:
            batch = self._queue.get()
            if batch is None:
                break
            self._credits.release()
            yield batch
        thread.join()

    def try_warm(self) -> bool:
        got = self._credits.acquire(blocking=False)  # clean: near miss, released only when it was really got
        item = next(iter(self.source), None)
        warmed = False
        if got and item is not None:
            self.stager.copy_batch(self.collate(item))
            warmed = True
        if got:
            self._credits.release()
        return warmed

    def stop(self, timeout: float = 5.0) -> bool:
        self._stop.set()
        if not self._credits.acquire(timeout=timeout):  # clean: the failed branch holds nothing and the other one releases
            return False
        self._credits.release()
        return True

    def drain_one(self, timeout: float) -> Optional[Dict[str, Tensor]]:
        if not self._gate.acquire(timeout=timeout):  # leak: the empty-queue handler returns with the gate taken
            return None
        try:
            batch = self._queue.get_nowait()
        except queue.Empty:
            return None
        if batch is not None:
            self._credits.release()
        self._gate.release()
        return batch
