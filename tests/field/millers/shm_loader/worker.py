from __future__ import annotations

import logging
import queue
import threading
from typing import Callable, List, Optional, Sequence

from .collate import Decode, DecodeError, Sample, collate_strict, pack
from .slots import Slot, SlotRing

log = logging.getLogger(__name__)


class Worker(threading.Thread):
    def __init__(self, ring: SlotRing, index_q: "queue.Queue[Optional[List[Sample]]]", out_q: "queue.Queue[Slot]", decode: Decode, on_taken: Callable[[], None] = lambda: None) -> None:
        super().__init__(daemon=True)
        self.ring = ring
        self.index_q = index_q
        self.out_q = out_q
        self.decode = decode
        self.on_taken = on_taken
        self.stop_requested = threading.Event()

    def run(self) -> None:
        while True:
            samples = self.index_q.get()
            if samples is None:
                break
            self.on_taken()
            self.serve(samples)

    def serve(self, samples: List[Sample]) -> None:
        raise NotImplementedError


class MapWorker(Worker):
    def serve(self, samples: List[Sample]) -> None:
        try:
            slot = collate_strict(self.ring, samples, self.decode)  # clean: queued, the loader recycles; None is skipped
        except DecodeError as e:
            log.warning("batch dropped: %s", e)
            return
        if slot is not None:
            self.out_q.put(slot)


class StreamWorker(Worker):
    """Iterable datasets: a batch is abandoned once a stop was requested."""

    def serve(self, samples: List[Sample]) -> None:
        slot = self.ring.claim()  # leak: a stop request that arrives while decoding returns with the slot
        if slot is None:
            return
        for s in samples:
            if self.stop_requested.is_set():
                return
            pack(slot, [self.decode(s) or b""])
        self.out_q.put(slot)


class RetryWorker(Worker):
    attempts = 3

    def serve(self, samples: List[Sample]) -> None:
        for _ in range(self.attempts):
            slot = self.ring.claim()  # leak: DecodeError retries with another slot, the failed one is lost
            if slot is None:
                return
            try:
                pack(slot, [self.decode(s) or b"" for s in samples])
            except DecodeError:
                log.info("decode failed, retrying")
                continue
            self.out_q.put(slot)
            return


class FillWorker(Worker):
    """Fills a slot from several index lists and emits it when it is full enough."""

    def __init__(self, *args, fill: int = 1024, **kw) -> None:
        super().__init__(*args, **kw)
        self.fill = fill
        self._slot: Optional[Slot] = None

    def serve(self, samples: List[Sample]) -> None:
        if self._slot is None:
            self._slot = self.ring.claim()  # clean: near miss, kept over calls until emitted or flushed by run
        if self._slot is None:
            return
        if pack(self._slot, samples) >= self.fill:
            self.out_q.put(self._slot)
            self._slot = None

    def run(self) -> None:
        super().run()
        if self._slot is not None:
            self.ring.recycle(self._slot)
            self._slot = None


def fan_out(ring: SlotRing, slot: Slot, consumers: Sequence[Callable[[Slot], None]]) -> None:
    """Each consumer calls ``drop_reader`` when it is done."""
    for consumer in consumers:
        consumer(ring.add_reader(slot))  # clean: the consumer drops its reader


def peek_first(ring: SlotRing, slot: Slot, limit: int) -> bytes:
    held = ring.add_reader(slot)  # leak: an over-long batch returns without drop_reader
    if held.length > limit:
        return b""
    head = bytes(held.mem[:held.length])
    ring.drop_reader(held)
    return head
