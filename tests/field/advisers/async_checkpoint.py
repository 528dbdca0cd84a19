"""Asynchronous sharded checkpoint writer with staging segments and save tickets."""
from __future__ import annotations

import queue
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch


@dataclass
class Segment:
    index: int
    storage: torch.Tensor
    used: int = 0


class StagingPool:
    def __init__(self, segment_bytes: int, count: int) -> None:
        self._cv = threading.Condition()
        self._idle = [Segment(i, torch.empty(segment_bytes, dtype=torch.uint8)) for i in range(count)]

    def get_segment(self, timeout: float | None = None) -> Segment | None:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._idle), timeout):
                return None
            segment = self._idle.pop()
            segment.used = 0
            return segment

    def put_segment(self, segment: Segment) -> None:
        with self._cv:
            self._idle.append(segment)
            self._cv.notify()


class SaveTickets:
    """Bounds how many saves may be under way at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open: set[int] = set()
        self._serial = 0

    def issue(self) -> int | None:
        if len(self.open) >= self.limit:
            return None
        self._serial += 1
        self.open.add(self._serial)
        return self._serial

    def retire(self, ticket: int) -> None:
        self.open.discard(ticket)


@dataclass
class WriteJob:
    path: Path
    segments: list[Segment]
    ticket: int | None = None
    error: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


class CheckpointWriter:
    def __init__(self, pool: StagingPool, tickets: SaveTickets) -> None:
        self.pool = pool
        self.tickets = tickets
        self.jobs: queue.Queue[WriteJob | None] = queue.Queue()
        self.last_good: Segment | None = None
        self.header: Segment | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _stage(self, tensor: torch.Tensor, segment: Segment) -> bool:
        flat = tensor.detach().contiguous().view(torch.uint8).flatten()
        if segment.used + flat.numel() > segment.storage.numel():
            return False
        segment.storage[segment.used : segment.used + flat.numel()].copy_(flat)
        segment.used += flat.numel()
        return True

    def save(self, state: Mapping[str, torch.Tensor], path: Path) -> bool:
        ticket = self.tickets.issue()  # clean: near miss, retired on both failing ways, else by the writer thread
        if ticket is None:
            return False
        segment = self.pool.get_segment(timeout=1.0)  # leak: a tensor that does not fit returns False with the segment in hand
        if segment is None:
            self.tickets.retire(ticket)
            return False
        for tensor in state.values():
            if not self._stage(tensor, segment):
                self.tickets.retire(ticket)
                return False
        self.jobs.put(WriteJob(path, [segment], ticket))
        return True

    def save_sharded(self, shards: list[Mapping[str, torch.Tensor]], path: Path) -> bool:
        ticket = self.tickets.issue()  # leak: the return after a failed shard gives back the segments and not the ticket
        if ticket is None:
            return False
        segments: list[Segment] = []
        for shard in shards:
            segment = self.pool.get_segment(timeout=1.0)  # clean: near miss, put into segments before any failing way
            if segment is not None:
                segments.append(segment)
            if segment is None or not all(self._stage(t, segment) for t in shard.values()):
                for held in segments:
                    self.pool.put_segment(held)
                return False
        self.jobs.put(WriteJob(path, segments, ticket))
        return True

    def _run(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            try:
                with job.path.open("wb") as out:
                    for segment in job.segments:
                        out.write(segment.storage[: segment.used].numpy().tobytes())
            except OSError as exc:
                job.error = str(exc)
            finally:
                for segment in job.segments:
                    self.pool.put_segment(segment)
                if job.ticket is not None:
                    self.tickets.retire(job.ticket)

    def save_metadata(self, blob: bytes, path: Path) -> None:
        segment = self.pool.get_segment()  # clean: near miss, without a ticket the job still puts its segment back
        data = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        segment.storage[: data.numel()].copy_(data)
        segment.used = data.numel()
        self.jobs.put(WriteJob(path, [segment]))

    @contextmanager
    def scratch(self) -> Iterator[Segment | None]:
        segment = self.pool.get_segment(timeout=0.1)  # clean: put back in the finally when there is one
        try:
            yield segment
        finally:
            if segment is not None:
                self.pool.put_segment(segment)

    def digest(self, state: Mapping[str, torch.Tensor]) -> int | None:
        with self.scratch() as segment:  # clean: near miss, the return inside the with puts it back
            if segment is None:
                return None
            for tensor in state.values():
                if not self._stage(tensor, segment):
                    return None
            return int(segment.storage[: segment.used].sum())

    def snapshot(self, tensor: torch.Tensor) -> bool:
        segment = self.pool.get_segment(timeout=0.1)  # leak: takes the place of last_good, which is not put back
        if segment is None:
            return False
        if not self._stage(tensor, segment):
            self.pool.put_segment(segment)
            return False
        self.last_good = segment
        return True

    def write_header(self, blob: bytes) -> None:
        if self.header is None:
            self.header = self.pool.get_segment()  # clean: near miss, taken once, given back in close
        data = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        self.header.storage[: data.numel()].copy_(data)
        self.header.used = data.numel()

    def load_into(self, path: Path, dst: torch.Tensor) -> bool:
        segment = self.pool.get_segment(timeout=1.0)  # leak: the handler of the missing file returns without putting it back
        if segment is None:
            return False
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return False
        segment.storage[: len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        dst.view(torch.uint8).flatten().copy_(segment.storage[: len(raw)])
        self.pool.put_segment(segment)
        return True

    def close(self) -> None:
        self.jobs.put(None)
        self._thread.join()
        for segment in (self.header, self.last_good):
            if segment is not None:
                self.pool.put_segment(segment)
        self.header = self.last_good = None
