"""Side streams, events and CUDA graph memory pools for the decode runner."""
from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Optional

import torch


class StreamPool:
    def __init__(self, size: int) -> None:
        self._idle = [torch.cuda.Stream() for _ in range(size)]

    def acquire(self) -> Optional[torch.cuda.Stream]:
        return self._idle.pop() if self._idle else None

    def release(self, stream: torch.cuda.Stream) -> None:
        self._idle.append(stream)


class EventPool:
    def __init__(self) -> None:
        self._idle: list[torch.cuda.Event] = []
        self.outstanding = 0

    def get(self) -> torch.cuda.Event:
        self.outstanding += 1
        return self._idle.pop() if self._idle else torch.cuda.Event()

    def put(self, event: torch.cuda.Event) -> None:
        self.outstanding -= 1
        self._idle.append(event)


class GraphPools:
    def __init__(self, count: int) -> None:
        self._free = [torch.cuda.graph_pool_handle() for _ in range(count)]

    def borrow(self) -> Any:
        return self._free.pop()

    def give_back(self, handle: Any) -> None:
        self._free.append(handle)

    def empty(self) -> bool:
        return not self._free


class SideStream:
    def __init__(self, pool: StreamPool, sync: bool = True) -> None:
        self.pool = pool
        self.sync = sync
        self.stream: Optional[torch.cuda.Stream] = None

    def __enter__(self) -> "SideStream":
        self.stream = self.pool.acquire()  # leak: __exit__ returns early for sync=False before the release
        return self

    def __exit__(self, et: type[BaseException] | None, ev: BaseException | None, tb: TracebackType | None) -> None:
        if self.stream is None:
            return
        if not self.sync:
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        self.stream.synchronize()
        self.pool.release(self.stream)
        self.stream = None


class CopyLane:
    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self.stream: Optional[torch.cuda.Stream] = None

    def __enter__(self) -> Optional[torch.cuda.Stream]:
        self.stream = self.pool.acquire()  # clean: near miss, the only early return of __exit__ is for None
        return self.stream

    def __exit__(self, *exc: object) -> None:
        if self.stream is None:
            return
        self.pool.release(self.stream)
        self.stream = None


class GraphRunner:
    def __init__(self, streams: StreamPool, events: EventPool, pools: GraphPools) -> None:
        self.streams = streams
        self.events = events
        self.pools = pools
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.pending: list[torch.cuda.Event] = []
        self._eager_side = SideStream(streams)
        self._lazy_side = SideStream(streams, sync=False)
        self._done = events.get()  # clean: near miss, kept for every replay and put back by close()

    def capture(self, batch: int, fn: Callable[[], None]) -> bool:
        if batch in self.graphs:
            return True
        if self.pools.empty():
            return False
        handle = self.pools.borrow()  # leak: a failed capture is handled with return False and the handle is dropped
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=handle):
                fn()
        except RuntimeError:
            return False
        self.graphs[batch] = (graph, handle)
        return True

    def recapture(self, batch: int, fn: Callable[[], None]) -> None:
        old = self.graphs.pop(batch, None)
        handle = old[1] if old is not None else self.pools.borrow()  # clean: near miss, the handle goes back into graphs or, on failure, to the pools
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=handle):
                fn()
        except RuntimeError:
            self.pools.give_back(handle)
            return
        self.graphs[batch] = (graph, handle)

    def drop(self, batch: int) -> None:
        entry = self.graphs.pop(batch, None)
        if entry is not None:
            self.pools.give_back(entry[1])

    def replay(self, batch: int) -> bool:
        entry = self.graphs.get(batch)
        if entry is None:
            return False
        entry[0].replay()
        self._done.record()
        return True

    def sample(self, logits: torch.Tensor, blocking: bool) -> torch.Tensor:
        side = self._eager_side if blocking else self._lazy_side
        with side as ctx:
            if ctx.stream is None:
                return logits.argmax(dim=-1)
            with torch.cuda.stream(ctx.stream):
                return logits.argmax(dim=-1)

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with CopyLane(self.streams) as lane:  # clean: the lane gives the stream back in __exit__
            if lane is None:
                dst.copy_(src)
                return
            with torch.cuda.stream(lane):
                dst.copy_(src, non_blocking=True)
            event = self.events.get()  # clean: near miss, moved into pending, which reap() and close() put back
            event.record(lane)
        self.pending.append(event)

    def reap(self) -> int:
        still: list[torch.cuda.Event] = []
        for event in self.pending:
            if event.query():
                self.events.put(event)
            else:
                still.append(event)
        freed = len(self.pending) - len(still)
        self.pending = still
        return freed

    def timed(self, fn: Callable[[], None]) -> float:
        start = self.events.get()  # leak: only the end event is put back
        end = self.events.get()  # clean: put back after the measurement
        start.record()
        fn()
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end)
        self.events.put(end)
        return elapsed

    def fan_out(self, jobs: list[Callable[[], None]]) -> None:
        lanes: list[torch.cuda.Stream] = []
        for job in jobs:
            lane = self.streams.acquire()  # leak: the release loop zips with jobs[1:] and so leaves the last lane out
            if lane is None:
                job()
                continue
            with torch.cuda.stream(lane):
                job()
            lanes.append(lane)
        for lane, _ in zip(lanes, jobs[1:]):
            lane.synchronize()
            self.streams.release(lane)

    def close(self) -> None:
        for batch in list(self.graphs):
            self.drop(batch)
        for event in self.pending:
            event.synchronize()
            self.events.put(event)
        self.pending.clear()
        self.events.put(self._done)
