from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Optional, Type

logger = logging.getLogger(__name__)


class CaptureFailed(Exception):
    pass


class StreamPool:
    def __init__(self, size: int) -> None:
        self._idle = list(range(size))

    def borrow(self) -> int:
        if not self._idle:
            raise CaptureFailed("out of side streams")
        return self._idle.pop()

    def give_back(self, stream: int) -> None:
        self._idle.append(stream)


class GraphMemPool:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.live: dict[int, int] = {}
        self._seq = 0

    def create(self, nbytes: int) -> Optional[int]:
        if sum(self.live.values()) + nbytes > self.limit:
            return None
        self._seq += 1
        self.live[self._seq] = nbytes
        return self._seq

    def destroy(self, handle: int) -> None:
        self.live.pop(handle, None)


class StaticBuffers:
    def __init__(self, sizes: list[int]) -> None:
        self._free: dict[int, list[bytearray]] = {s: [bytearray(s) for _ in range(3)] for s in sizes}

    def lease(self, size: int) -> Optional[bytearray]:
        bucket = self._free.get(size)
        return bucket.pop() if bucket else None

    def unlease(self, buf: bytearray) -> None:
        self._free.setdefault(len(buf), []).append(buf)


@dataclass
class CapturedGraph:
    batch_size: int
    pool: int
    inputs: bytearray
    logits: Optional[bytearray] = None


class SideStream:
    def __init__(self, streams: StreamPool, nested: bool) -> None:
        self.streams = streams
        self.nested = nested
        self.stream = -1

    def __enter__(self) -> int:
        self.stream = self.streams.borrow()  # leak: a nested section leaves __exit__ before the stream is given back
        return self.stream

    def __exit__(
        self, exc_type: Optional[Type[BaseException]], exc: Optional[BaseException], tb: Optional[TracebackType]
    ) -> bool:
        if self.nested:
            return False
        self.streams.give_back(self.stream)
        return exc_type is CaptureFailed


class GraphRunner:
    def __init__(self, streams: StreamPool, mem: GraphMemPool, buffers: StaticBuffers, sizes: list[int]) -> None:
        self.streams = streams
        self.mem = mem
        self.buffers = buffers
        self.sizes = sorted(sizes)
        self.graphs: dict[int, CapturedGraph] = {}
        self.scratch: Optional[int] = None

    def capture_one(self, batch_size: int) -> Optional[CapturedGraph]:
        pool = self.mem.create(batch_size * 1024)  # clean: near miss, destroyed when no input buffer is left, else lives in the graph
        if pool is None:
            return None
        inputs = self.buffers.lease(batch_size)  # clean: travels in the graph, drop() unleases it
        if inputs is None:
            self.mem.destroy(pool)
            return None
        return CapturedGraph(batch_size, pool, inputs)

    def capture_all(self, rounds: int = 2) -> int:
        for _ in range(rounds):
            for size in reversed(self.sizes):
                graph = self.capture_one(size)  # leak: the second round overwrites the first round's graph without drop()
                if graph is None:
                    logger.info("stopping capture at %d", size)
                    break
                self.graphs[size] = graph
        return len(self.graphs)

    def warm(self, depth: int) -> int:
        with SideStream(self.streams, nested=depth > 0) as stream:
            if depth < 2:
                self.warm(depth + 1)
            return stream

    def recapture(self, size: int) -> bool:
        graph = self.capture_one(size)  # clean: near miss, the graph of that size is dropped before this one is stored
        if graph is None:
            return False
        self.drop(size)
        self.graphs[size] = graph
        return True

    def drop(self, size: int) -> None:
        graph = self.graphs.pop(size, None)
        if graph is None:
            return
        self.mem.destroy(graph.pool)
        self.buffers.unlease(graph.inputs)
        if graph.logits is not None:
            self.buffers.unlease(graph.logits)

    def attach_logits(self, size: int) -> bool:
        graph = self.graphs.get(size)
        if graph is None:
            return False
        if graph.logits is None:
            graph.logits = self.buffers.lease(size)  # clean: near miss, taken only for an empty field that drop() unleases
        return graph.logits is not None

    def profile(self, size: int) -> int:
        graph = self.capture_one(size)  # leak: only the memory pool of the trial graph is destroyed, its input buffer is dropped
        if graph is None:
            return 0
        used = self.mem.live[graph.pool]
        self.mem.destroy(graph.pool)
        return used

    def ensure_scratch(self, nbytes: int) -> Optional[int]:
        if self.scratch is not None and self.mem.live[self.scratch] >= nbytes:
            return self.scratch
        grown = self.mem.create(nbytes)  # clean: near miss, the smaller scratch is destroyed before the field moves on
        if grown is None:
            return None
        if self.scratch is not None:
            self.mem.destroy(self.scratch)
        self.scratch = grown
        return grown

    def replay(self, batch: bytes) -> Optional[bytes]:
        idx = bisect.bisect_left(self.sizes, len(batch))
        if idx == len(self.sizes):
            return self._eager(batch)
        stream = self.streams.borrow()  # leak: a size with no graph goes off to the eager path with the stream still borrowed
        graph = self.graphs.get(self.sizes[idx])
        if graph is None:
            return self._eager(batch)
        graph.inputs[: len(batch)] = batch
        out = bytes(graph.inputs[: len(batch)])
        self.streams.give_back(stream)
        return out

    def _eager(self, batch: bytes) -> Optional[bytes]:
        stream = self.streams.borrow()  # clean: near miss, the empty batch returns through the finally
        try:
            if not batch:
                return None
            return bytes(batch)
        finally:
            self.streams.give_back(stream)

    def shutdown(self) -> None:
        for size in list(self.graphs):
            self.drop(size)
        if self.scratch is not None:
            self.mem.destroy(self.scratch)
            self.scratch = None
