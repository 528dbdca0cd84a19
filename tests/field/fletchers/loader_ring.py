"""Shared-memory ring between loader workers and the trainer."""
from __future__ import annotations

import logging
import queue
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional

logger = logging.getLogger(__name__)


@dataclass
class RingSlot:
    index: int
    mem: bytearray
    length: int = 0


class SlotRing:

    def __init__(self, n: int, nbytes: int) -> None:
        self._free: "queue.Queue[RingSlot]" = queue.Queue()
        for i in range(n):
            self._free.put(RingSlot(i, bytearray(nbytes)))
        self.nbytes = nbytes

    def claim(self, timeout: Optional[float] = None) -> Optional[RingSlot]:
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            return None

    def yield_back(self, slot: RingSlot) -> None:
        slot.length = 0
        self._free.put(slot)

    def free_slots(self) -> int:
        return self._free.qsize()

    @contextmanager
    def claimed(self, timeout: float = 1.0) -> Iterator[RingSlot]:
        slot = self.claim(timeout)  # leak: no finally, a body that raises into a surviving caller skips the yield_back
        if slot is None:
            raise TimeoutError("ring is full")
        yield slot
        self.yield_back(slot)


class Batch:
    """A decoded batch that still lives in a ring slot."""

    def __init__(self, slot: RingSlot, ring: SlotRing) -> None:
        self._slot: Optional[RingSlot] = slot
        self._ring = ring

    @property
    def data(self) -> bytes:
        return bytes(self._slot.mem[: self._slot.length])

    def release(self) -> None:
        if self._slot is not None:
            self._ring.yield_back(self._slot)
            self._slot = None

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        self.release()


class Worker:

    def __init__(self, ring: SlotRing, out: "queue.Queue[RingSlot]", min_len: int = 4) -> None:
        self.ring = ring
        self.out = out
        self.min_len = min_len

    def produce(self, samples: Iterable[bytes]) -> int:
        n = 0
        for sample in samples:
            slot = self.ring.claim(timeout=1.0)  # leak: samples shorter than min_len are skipped with the slot claimed
            if slot is None:
                break
            slot.length = self._decode(sample, slot)
            if slot.length < self.min_len:
                continue
            self.out.put(slot)
            n += 1
        return n

    def produce_filtered(self, samples: Iterable[bytes]) -> int:
        n = 0
        slot: Optional[RingSlot] = None
        for sample in samples:
            if slot is None:
                slot = self.ring.claim(timeout=1.0)  # clean: near miss, a slot that was not sent is used for the next sample or yielded back after the loop
                if slot is None:
                    break
            slot.length = self._decode(sample, slot)
            if slot.length < self.min_len:
                continue
            self.out.put(slot)
            slot = None
            n += 1
        if slot is not None:
            self.ring.yield_back(slot)
        return n

    def produce_checked(self, samples: Iterable[bytes]) -> int:
        bad = 0
        for sample in samples:
            slot = self.ring.claim()  # leak: the survived ValueError loses it
            try:
                slot.length = self._decode_strict(sample, slot)
                self.out.put(slot)
            except ValueError:
                bad += 1
        return bad

    def produce_guarded(self, samples: Iterable[bytes]) -> int:
        bad = 0
        for sample in samples:
            slot = self.ring.claim()  # clean: near miss, the handler yields it back
            try:
                slot.length = self._decode_strict(sample, slot)
            except ValueError:
                self.ring.yield_back(slot)
                bad += 1
            else:
                self.out.put(slot)
        return bad

    def probe(self, samples: Iterable[bytes]) -> int:
        ok = 0
        for sample in samples:
            try:
                with self.ring.claimed() as slot:  # clean: with, the fault is the context manager's own
                    slot.length = self._decode_strict(sample, slot)
                    ok += 1
            except ValueError:
                logger.debug("undecodable sample")
        return ok

    def _decode(self, sample: bytes, slot: RingSlot) -> int:
        n = min(len(sample), len(slot.mem))
        slot.mem[:n] = sample[:n]
        return n

    def _decode_strict(self, sample: bytes, slot: RingSlot) -> int:
        if len(sample) > len(slot.mem):
            raise ValueError("sample is larger than a slot")
        return self._decode(sample, slot)


class Loader:

    def __init__(self, ring: SlotRing, ready: "queue.Queue[RingSlot]") -> None:
        self.ring = ring
        self.ready = ready
        self.last: Optional[Batch] = None

    def _next_slot(self) -> Optional[RingSlot]:
        try:
            return self.ready.get_nowait()
        except queue.Empty:
            return None

    def batches(self) -> Iterator[Batch]:
        """Every batch is released when the consumer asks for the next one."""
        while True:
            slot = self._next_slot()
            if slot is None:
                return
            batch = Batch(slot, self.ring)
            try:
                yield batch
            finally:
                batch.release()

    def scratch_batch(self, payload: bytes) -> Optional[Batch]:
        slot = self.ring.claim(timeout=0.1)  # clean: the slot moves into the batch
        if slot is None:
            return None
        slot.mem[: len(payload)] = payload
        slot.length = len(payload)
        return Batch(slot, self.ring)

    def warm(self, payload: bytes) -> int:
        batch = self.scratch_batch(payload)  # leak: the length is taken, the batch is never released
        return len(batch.data) if batch is not None else 0

    def echo(self, payload: bytes) -> bytes:
        batch = self.scratch_batch(payload)  # clean: near miss, with releases it at the return
        if batch is None:
            return b""
        with batch:
            return batch.data

    def remember(self, payload: bytes) -> None:
        batch = self.scratch_batch(payload)  # clean: near miss, the batch remembered before is released
        if batch is None:
            return
        if self.last is not None:
            self.last.release()
        self.last = batch

    def padded(self, payloads: List[bytes]) -> Iterator[bytes]:
        for payload in payloads:
            slot = self.ring.claim()  # leak: a consumer that stops early, as first_padded() does, closes the generator at the yield
            slot.mem[: len(payload)] = payload
            yield bytes(slot.mem)
            self.ring.yield_back(slot)

    def first_padded(self, payloads: List[bytes]) -> Optional[bytes]:
        for item in self.padded(payloads):  # clean: the generator hands out copies, the slot is its own
            return item
        return None

    def stop(self) -> None:
        if self.last is not None:
            self.last.release()
            self.last = None
        while True:
            slot = self._next_slot()
            if slot is None:
                break
            self.ring.yield_back(slot)
