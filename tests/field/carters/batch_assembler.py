"""Continuous batching for the embedding endpoint: lanes of the batch matrix move through queues and tables."""
from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Callable, Optional, Sequence


class LaneAllocator:
    def __init__(self, lanes: int) -> None:
        self._idle = list(range(lanes))
        heapq.heapify(self._idle)

    def assign(self) -> Optional[int]:
        return heapq.heappop(self._idle) if self._idle else None

    def reclaim(self, lane: int) -> None:
        heapq.heappush(self._idle, lane)

    @property
    def idle(self) -> int:
        return len(self._idle)


@dataclass(eq=False)
class Job:
    deadline: float
    job_id: str
    tokens: list[int] = field(default_factory=list)
    lane: Optional[int] = None
    on_done: Optional[Callable[["Job"], None]] = None

    def __lt__(self, other: "Job") -> bool:
        return self.deadline < other.deadline


class Assembler:
    def __init__(self, lanes: LaneAllocator, max_tokens: int) -> None:
        self.lanes = lanes
        self.max_tokens = max_tokens
        self.ready: deque[Job] = deque()
        self.by_id: dict[str, Job] = {}
        self.groups: defaultdict[str, list[int]] = defaultdict(list)
        self.rejected: list[str] = []

    def enqueue(self, job: Job) -> bool:
        job.lane = self.lanes.assign()  # clean: near miss, in the job, the queue and the table; step or abort reclaims
        if job.lane is None:
            return False
        self.by_id[job.job_id] = job
        self.ready.append(job)
        return True

    def step(self, now: float) -> int:
        ran = 0
        for _ in range(len(self.ready)):
            job = self.ready.popleft()
            if job.deadline < now:
                self.rejected.append(job.job_id)
                self._retire(job)
                continue
            if len(job.tokens) < self.max_tokens:
                job.tokens.append(0)
                self.ready.append(job)
            else:
                self._retire(job)
            ran += 1
        return ran

    def _retire(self, job: Job) -> None:
        self.by_id.pop(job.job_id, None)
        if job.lane is not None:
            self.lanes.reclaim(job.lane)
            job.lane = None
        if job.on_done is not None:
            job.on_done(job)

    def abort(self, job_id: str) -> bool:
        job = self.by_id.get(job_id)
        if job is None:
            return False
        self.ready.remove(job)
        self._retire(job)
        return True

    def group(self, name: str, n: int) -> bool:
        for _ in range(n):
            lane = self.lanes.assign()  # clean: near miss, in the group's list, which ungroup reclaims on the shortfall too
            if lane is None:
                self.ungroup(name)
                return False
            self.groups[name].append(lane)
        return True

    def ungroup(self, name: str) -> None:
        for lane in self.groups.pop(name, []):
            self.lanes.reclaim(lane)


class EdfQueue:
    """Earliest deadline first; late jobs are shed."""

    def __init__(self, lanes: LaneAllocator) -> None:
        self.lanes = lanes
        self._heap: list[Job] = []

    def push(self, job: Job) -> bool:
        job.lane = self.lanes.assign()  # leak: a late job is popped and shed with its lane
        if job.lane is None:
            return False
        heapq.heappush(self._heap, job)
        return True

    def run_next(self, now: float, run: Callable[[Job], None]) -> Optional[str]:
        while self._heap:
            job = heapq.heappop(self._heap)
            if job.deadline < now:
                continue
            run(job)
            if job.lane is not None:
                self.lanes.reclaim(job.lane)
            return job.job_id
        return None


class SessionTable:
    def __init__(self, lanes: LaneAllocator) -> None:
        self.lanes = lanes
        self._lane_of: dict[str, int] = {}
        self._last_seen: dict[str, float] = {}

    def touch(self, session: str, now: float) -> Optional[int]:
        lane = self._lane_of.get(session)
        if lane is None:
            lane = self.lanes.assign()  # leak: sweep deletes the entry of an idle session without reclaim
            if lane is None:
                return None
            self._lane_of[session] = lane
        self._last_seen[session] = now
        return lane

    def leave(self, session: str) -> None:
        self._last_seen.pop(session, None)
        lane = self._lane_of.pop(session, None)
        if lane is not None:
            self.lanes.reclaim(lane)

    def sweep(self, now: float, ttl: float) -> int:
        idle = [s for s, seen in self._last_seen.items() if now - seen > ttl]
        for session in idle:
            del self._last_seen[session]
            del self._lane_of[session]
        return len(idle)


class PairTable:
    """Query and document towers run in two lanes under one key."""

    def __init__(self, lanes: LaneAllocator) -> None:
        self.lanes = lanes
        self._pairs: dict[str, tuple[int, int]] = {}

    def open_pair(self, key: str) -> bool:
        if key in self._pairs:
            return True
        query = self.lanes.assign()  # clean: near miss, reclaimed when the second lane is missing
        if query is None:
            return False
        doc = self.lanes.assign()  # clean: in the table's pair
        if doc is None:
            self.lanes.reclaim(query)
            return False
        self._pairs[key] = (query, doc)
        return True

    def close_pair(self, key: str) -> None:
        for lane in self._pairs.pop(key, ()):
            self.lanes.reclaim(lane)


class RerankTable:
    def __init__(self, lanes: LaneAllocator) -> None:
        self.lanes = lanes
        self._slots: dict[str, dict[str, int]] = {}

    def open(self, key: str) -> bool:
        cross = self.lanes.assign()  # clean: in the table, close reclaims it
        bias = self.lanes.assign()  # leak: close takes the cross lane out of the entry and drops the rest
        if cross is None or bias is None:
            for lane in (cross, bias):
                if lane is not None:
                    self.lanes.reclaim(lane)
            return False
        self.close(key)
        self._slots[key] = {"cross": cross, "bias": bias}
        return True

    def close(self, key: str) -> None:
        entry = self._slots.pop(key, None)
        if entry is not None:
            self.lanes.reclaim(entry["cross"])


def embed_all(lanes: LaneAllocator, texts: Sequence[list[int]], embed: Callable[[int, list[int]], float]) -> dict[int, float]:
    pending: dict[int, list[int]] = {}
    out: dict[int, float] = {}
    for tokens in texts:
        lane = lanes.assign()  # clean: near miss, the dict is emptied into reclaim after the loop
        if lane is None:
            break
        pending[lane] = tokens
    while pending:
        lane, tokens = pending.popitem()
        out[lane] = embed(lane, tokens)
        lanes.reclaim(lane)
    return out


def embed_distinct(lanes: LaneAllocator, texts: Sequence[tuple[str, list[int]]], embed: Callable[[int, list[int]], float]) -> dict[str, float]:
    held: dict[str, int] = {}
    out: dict[str, float] = {}
    for key, tokens in texts:
        lane = lanes.assign()  # leak: a repeated key overwrites the lane that it had
        if lane is None:
            break
        held[key] = lane
        out[key] = embed(lane, tokens)
    for lane in held.values():
        lanes.reclaim(lane)
    return out


def main() -> None:
    lanes = LaneAllocator(6)
    asm = Assembler(lanes, 2)
    done: list[str] = []
    for i in range(3):
        asm.enqueue(Job(float(10 - i), f"j{i}", on_done=lambda j: done.append(j.job_id)))
    asm.abort("j1")
    while asm.step(1.0):
        pass
    asm.group("g", 4)
    asm.ungroup("g")
    pairs = PairTable(lanes)
    pairs.open_pair("k")
    pairs.close_pair("k")
    print(done, embed_all(lanes, [[1], [2, 3]], lambda lane, t: float(sum(t))))
    print("idle", lanes.idle)


if __name__ == "__main__":
    main()
