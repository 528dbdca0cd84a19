"""Multi-worker data loader that passes samples through shared segments.

The parent owns a fixed set of segments.  A worker writes a packed batch
into a segment and sends its index; the consumer wraps it as a tensor and
must recycle the segment after the copy to the device.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Dict, Generator, Iterable, Iterator, List, Optional, Sequence

import numpy as np
import torch

logger = logging.getLogger("dataloader")

_STOP = object()


class SampleTooLong(ValueError):
    pass


class CorruptShard(IOError):
    pass


class Segment:
    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.array = np.zeros(nbytes, dtype=np.uint8)
        self.used = 0

    def write(self, payload: bytes) -> None:
        if len(payload) > self.array.nbytes:
            raise SampleTooLong(f"{len(payload)} > {self.array.nbytes}")
        self.array[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        self.used = len(payload)

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.array[: self.used])


class SegmentBank:
    def __init__(self, count: int, nbytes: int) -> None:
        self._vacant: "queue.Queue[Segment]" = queue.Queue()
        for i in range(count):
            self._vacant.put(Segment(i, nbytes))

    def obtain(self, timeout: Optional[float] = None) -> Optional[Segment]:
        try:
            seg = self._vacant.get(timeout=timeout)  # clean: returned, and on Empty nothing was taken
        except queue.Empty:
            return None
        seg.used = 0
        return seg

    def obtain_pair(self) -> Optional[tuple[Segment, Segment]]:
        try:
            left = self._vacant.get_nowait()  # leak: if the second get finds the queue empty, left is forgotten in the handler
            right = self._vacant.get_nowait()  # clean: returned straight away
        except queue.Empty:
            return None
        return left, right

    def obtain_upto(self, count: int) -> List[Segment]:
        got: List[Segment] = []
        try:
            while len(got) < count:
                got.append(self._vacant.get_nowait())  # clean: the handler passes on and whatever was got is returned
        except queue.Empty:
            pass
        return got

    def recycle(self, seg: Segment) -> None:
        self._vacant.put(seg)

    @property
    def vacant(self) -> int:
        return self._vacant.qsize()


@dataclass
class Packet:
    step: int
    seg: Segment
    shape: Sequence[int]


def read_shard(path: str) -> Iterator[bytes]:
    with open(path, "rb") as fh:
        if fh.read(4) != b"SHRD":
            raise CorruptShard(path)
        while True:
            head = fh.read(4)
            if len(head) < 4:
                return
            yield fh.read(int.from_bytes(head, "little"))


class PackWorker(threading.Thread):
    """Reads shards and fills segments until told to stop."""

    def __init__(self, bank: SegmentBank, jobs: queue.Queue, out: queue.Queue) -> None:
        super().__init__(daemon=True)
        self.bank = bank
        self.jobs = jobs
        self.out = out
        self.skipped = 0
        self._steps = 0
        self._halt = threading.Event()

    def halt(self) -> None:
        self._halt.set()

    def run(self) -> None:
        while True:
            path = self.jobs.get()
            if path is _STOP:
                break
            try:
                self._pack(path)
            except CorruptShard:
                logger.warning("skipping %s", path)
        self.out.put(_STOP)

    def _pack(self, path: str) -> None:
        for payload in read_shard(path):
            seg = self.bank.obtain()  # leak: an oversized sample goes on with the next one and leaves the segment behind
            try:
                seg.write(payload)
            except SampleTooLong:
                self.skipped += 1
                continue
            self.out.put(Packet(self._steps, seg, (seg.used,)))
            self._steps += 1

    def pack_aligned(self, path: str, multiple: int) -> None:
        seg: Optional[Segment] = None
        for payload in read_shard(path):
            if seg is None:
                seg = self.bank.obtain(timeout=1.0)  # leak: halted while a segment is held (fresh, or kept over a skipped sample), the return abandons it
            if seg is None or self._halt.is_set():
                return
            if len(payload) % multiple or len(payload) > seg.array.nbytes:
                self.skipped += 1
                continue
            seg.write(payload)
            self.out.put(Packet(self._steps, seg, (-1, multiple)))
            seg = None
        if seg is not None:
            self.bank.recycle(seg)


class Loader:
    def __init__(self, bank: SegmentBank, out: queue.Queue, device: str = "cpu") -> None:
        self.bank = bank
        self.out = out
        self.device = device
        self._ahead: deque[Segment] = deque()
        self._open: Dict[int, Segment] = {}
        self._pinned: Dict[int, Segment] = {}

    def _to_device(self, seg: Segment) -> torch.Tensor:
        return seg.tensor().to(self.device, copy=True)

    def batches(self) -> Generator[torch.Tensor, None, None]:
        while True:
            item = self.out.get()
            if item is _STOP:
                return
            try:
                yield self._to_device(item.seg)
            finally:
                self.bank.recycle(item.seg)

    def synthetic(self, payloads: Iterable[bytes]) -> Generator[torch.Tensor, None, None]:
        """Batches from memory; used by the throughput benchmark."""
        for payload in payloads:
            seg = self.bank.obtain(timeout=5.0)  # clean: a None stops the generator, else the finally recycles, also on close
            if seg is None:
                return
            try:
                seg.write(payload)
                yield self._to_device(seg)
            finally:
                self.bank.recycle(seg)

    def calibrate(self, payloads: Iterable[bytes], limit: int) -> Generator[int, None, None]:
        for n, payload in enumerate(payloads):
            seg = self.bank.obtain()  # leak: reaching the limit returns between the obtain and the recycle
            if n >= limit:
                return
            used = min(len(payload), seg.array.nbytes)
            seg.array[:used] = np.frombuffer(payload[:used], dtype=np.uint8)
            total = int(seg.array[:used].sum())
            self.bank.recycle(seg)
            yield total

    def lookahead(self, count: int) -> int:
        self._ahead.extend(self.bank.obtain_upto(count))  # clean: the deque keeps them until next_ahead or shutdown
        return len(self._ahead)

    def next_ahead(self, payload: bytes) -> Optional[torch.Tensor]:
        if not self._ahead:
            return None
        seg = self._ahead.popleft()
        try:
            seg.write(payload)
        except SampleTooLong:
            self._ahead.appendleft(seg)
            return None
        out = self._to_device(seg)
        self.bank.recycle(seg)
        return out

    def merge(self, a: bytes, b: bytes, check: Callable[[torch.Tensor], bool]) -> Optional[torch.Tensor]:
        pair = self.bank.obtain_pair()  # clean: recycled by the finally on either return
        if pair is None:
            return None
        left, right = pair
        try:
            left.write(a)
            right.write(b)
            merged = torch.cat([left.tensor(), right.tensor()])
            return merged if check(merged) else None
        finally:
            for seg in (right, left):
                self.bank.recycle(seg)

    def open_view(self, step: int) -> torch.Tensor:
        """Zero-copy view for ``step``; close_view ends its life."""
        seg = self._open.get(step)
        if seg is None:
            seg = self.bank.obtain()  # clean: entered in the table below, close_view or shutdown recycles it
            self._open[step] = seg
        return seg.tensor()

    def pin_step(self, step: int) -> torch.Tensor:
        seg = self.bank.obtain()  # leak: a second pin of the same step overwrites the entry and the older segment is lost
        self._pinned[step] = seg
        return seg.tensor()

    def close_view(self, step: int) -> None:
        seg = self._open.pop(step, None)
        if seg is not None:
            self.bank.recycle(seg)

    def shutdown(self) -> None:
        for seg in [*self._open.values(), *self._pinned.values(), *self._ahead]:
            self.bank.recycle(seg)
        for held in (self._open, self._pinned, self._ahead):
            held.clear()
