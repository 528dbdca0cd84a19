"""Vision encoder cache: image embeddings in leased tensor rows, shared by requests through references."""
from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Protocol


class Rows(Protocol):
    def allocate(self, n: int) -> "Span | None": ...
    def deallocate(self, span: "Span") -> None: ...


@dataclass(frozen=True)
class Span:
    start: int
    length: int


class RowAllocator:
    def __init__(self, total):
        self.holes = [Span(0, total)]

    def allocate(self, n):
        for i, hole in enumerate(self.holes):
            if hole.length >= n:
                self.holes[i] = Span(hole.start + n, hole.length - n)
                return Span(hole.start, n)
        return None

    def deallocate(self, span):
        self.holes.append(span)
        self.holes.sort(key=lambda s: s.start)


class ComputeQuota:
    def __init__(self, patches):
        self.patches = patches

    def acquire(self, n):
        if self.patches < n:
            return False
        self.patches -= n
        return True

    def release(self, n):
        self.patches += n


class State(enum.Enum):
    QUEUED = 1
    ENCODED = 2
    DEAD = 3


@dataclass
class Entry:
    digest: str
    span: Span
    deepstack: Span | None = None
    users: set = field(default_factory=set)
    pinned: int = 0

    def pin(self):
        self.pinned += 1
        return self

    def unpin(self):
        self.pinned -= 1


@dataclass
class ImageJob:
    digest: str
    patches: int
    state: State = State.QUEUED
    target: Span | None = None


class EncoderCache:
    def __init__(self, rows: Rows, levels=0):
        self.rows = rows
        self.levels = levels
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.pins: dict[str, list[Entry]] = defaultdict(list)
        self.focus: dict[str, Entry] = {}

    def put(self, digest, length):
        if digest in self.entries:
            self.entries.move_to_end(digest)
            return True
        span = self.rows.allocate(length)  # clean: near miss, evict and wipe both deallocate the span
        if span is None:
            return False
        entry = Entry(digest, span)
        if self.levels:
            entry.deepstack = self.rows.allocate(length * self.levels)  # leak: wipe gives it back, evict doesn't
            if entry.deepstack is None:
                self.rows.deallocate(span)
                return False
        self.entries[digest] = entry
        return True

    def evict(self, n):
        victims = [d for d, e in self.entries.items() if not e.pinned][:n]
        for digest in victims:
            entry = self.entries.pop(digest)
            self.rows.deallocate(entry.span)
        return len(victims)

    def use(self, request, digest):
        entry = self.entries.get(digest)
        if entry is None:
            return None
        self.pins[request].append(entry.pin())  # clean: near miss, both finish and cancel unpin the list
        entry.users.add(request)
        return entry.span

    def look_at(self, request, digest):
        """The entry that the request attends to in this step."""
        entry = self.entries[digest]
        self.focus[request] = entry.pin()  # leak: the next step's look_at overwrites the pinned entry
        return entry.span.start

    def finish(self, request):
        for entry in self.pins.pop(request, ()):
            entry.unpin()
            entry.users.discard(request)
        if (entry := self.focus.pop(request, None)) is not None:
            entry.unpin()

    def cancel(self, request):
        while self.pins[request]:
            entry = self.pins[request].pop()
            entry.users.discard(request)
            entry.unpin()
        del self.pins[request]
        entry = self.focus.pop(request, None)
        if entry:
            entry.unpin()

    def wipe(self):
        for entry in self.entries.values():
            self.rows.deallocate(entry.span)
            if entry.deepstack is not None:
                self.rows.deallocate(entry.deepstack)
        self.entries.clear()


class EncodeScheduler:
    def __init__(self, rows: Rows, quota: ComputeQuota):
        self.rows = rows
        self.quota = quota
        self.jobs: dict[str, ImageJob] = {}
        self.batch: list[ImageJob] = []
        self.staged: Span | None = None

    def submit(self, digest, patches):
        if digest in self.jobs or not self.quota.acquire(patches):  # clean: near miss, both ends release it
            return False
        job = ImageJob(digest, patches)
        job.target = self.rows.allocate(patches)  # leak: drop removes the job with its rows
        if job.target is None:
            self.quota.release(patches)
            return False
        self.jobs[digest] = job
        return True

    def form_batch(self, limit):
        self.batch = [j for j in self.jobs.values() if j.state is State.QUEUED][:limit]
        total = sum(j.patches for j in self.batch)
        if self.staged is not None:
            self.rows.deallocate(self.staged)
            self.staged = None
        if total:
            self.staged = self.rows.allocate(total)  # clean: near miss, next form_batch or halt gives it back
        return self.staged is not None

    def complete(self, digest, copy_rows):
        job = self.jobs.pop(digest)
        job.state = State.ENCODED
        copy_rows(job.target)
        self.rows.deallocate(job.target)
        self.quota.release(job.patches)

    def drop(self, digest):
        job = self.jobs.pop(digest, None)
        if job is None:
            return
        job.state = State.DEAD
        self.quota.release(job.patches)

    def halt(self):
        for digest in list(self.jobs):
            self.drop(digest)
        if self.staged is not None:
            self.rows.deallocate(self.staged)
            self.staged = None
