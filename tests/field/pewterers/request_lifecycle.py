"""Retrieval requests and the result buffers that travel with them."""
from __future__ import annotations

import heapq
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Tuple


class ResultBuffer:
    __slots__ = ("ident", "items")

    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.items: List[int] = []


class ResultArena:
    def __init__(self, count: int) -> None:
        self._guard = threading.Lock()
        self._unused = [ResultBuffer(i) for i in range(count)]

    def obtain(self) -> Optional[ResultBuffer]:
        with self._guard:
            if not self._unused:
                return None
            buf = self._unused.pop()
        buf.items.clear()
        return buf

    def relinquish(self, buf: ResultBuffer) -> None:
        with self._guard:
            self._unused.append(buf)

    def unused(self) -> int:
        return len(self._unused)


@dataclass
class RetrievalRequest:
    request_id: int
    query: List[int]
    deadline: int = 0
    buf: Optional[ResultBuffer] = None
    owns_buf: bool = False
    on_done: Optional[Callable[["RetrievalRequest"], None]] = None


class Retriever:
    def __init__(self, arena: ResultArena, corpus: List[int]) -> None:
        self.arena = arena
        self.corpus = corpus
        self.queue: Deque[RetrievalRequest] = deque()
        self.by_deadline: List[Tuple[int, int, RetrievalRequest]] = []
        self._shared: Optional[ResultBuffer] = None
        self._streams: Dict[int, ResultBuffer] = {}
        self.rejected = 0

    def _search(self, query: List[int], into: ResultBuffer) -> int:
        into.items.extend(c for c in self.corpus if any(c % q == 0 for q in query if q))
        return len(into.items)

    def enqueue(self, request: RetrievalRequest) -> bool:
        buf = self.arena.obtain()  # clean: moved into the queued request with owns_buf, finish() relinquishes
        if buf is None:
            self.rejected += 1
            return False
        request.buf, request.owns_buf = buf, True
        self.queue.append(request)
        return True

    def enqueue_shared(self, request: RetrievalRequest) -> bool:
        """All shared requests write into one buffer of the retriever."""
        if self._shared is None:
            self._shared = self.arena.obtain()  # clean: near miss, taken once and relinquished in close()
            if self._shared is None:
                return False
        request.buf, request.owns_buf = self._shared, False
        self.queue.append(request)
        return True

    def enqueue_deadline(self, request: RetrievalRequest) -> bool:
        buf = self.arena.obtain()  # leak: expire() pops late requests without finish
        if buf is None:
            return False
        request.buf, request.owns_buf = buf, True
        heapq.heappush(self.by_deadline, (request.deadline, request.request_id, request))
        return True

    def expire(self, now: int) -> int:
        late = 0
        while self.by_deadline and self.by_deadline[0][0] < now:
            heapq.heappop(self.by_deadline)
            late += 1
        return late

    def run_deadline(self) -> Optional[int]:
        if not self.by_deadline:
            return None
        _, _, request = heapq.heappop(self.by_deadline)
        hits = self._search(request.query, request.buf)
        self.finish(request)
        return hits

    def finish(self, request: RetrievalRequest) -> None:
        buf, request.buf = request.buf, None
        if buf is not None and request.owns_buf:
            self.arena.relinquish(buf)
        request.owns_buf = False

    def run_next(self) -> Optional[int]:
        if not self.queue:
            return None
        request = self.queue.popleft()
        hits = self._search(request.query, request.buf)
        self.finish(request)
        return hits

    def run_inline(self, request: RetrievalRequest, reuse: Optional[ResultBuffer] = None) -> int:
        if reuse is not None:
            request.buf = reuse
        else:
            request.buf = self.arena.obtain()  # leak: owns_buf stays False, so finish() keeps the buffer
        if request.buf is None:
            return 0
        hits = self._search(request.query, request.buf)
        self.finish(request)
        return hits

    def run_with(self, request: RetrievalRequest, reuse: Optional[ResultBuffer] = None) -> int:
        request.buf, request.owns_buf = reuse, False
        if request.buf is None:
            request.buf = self.arena.obtain()  # clean: near miss, owns_buf is set from the same result and finish() reads it
            request.owns_buf = request.buf is not None
        if request.buf is None:
            return 0
        hits = self._search(request.query, request.buf)
        self.finish(request)
        return hits

    def run_async(self, request: RetrievalRequest) -> bool:
        buf = self.arena.obtain()  # leak: without a callback it returns before the buffer is attached
        if buf is None:
            return False
        self._search(request.query, buf)
        if request.on_done is None:
            self.rejected += 1
            return False
        request.buf, request.owns_buf = buf, True
        request.on_done(request)
        self.finish(request)
        return True

    def steal(self, request: RetrievalRequest) -> Optional[ResultBuffer]:
        """Takes the buffer out of a queued request; caller relinquishes."""
        if not request.owns_buf:
            return None
        self.queue.remove(request)
        buf, request.buf, request.owns_buf = request.buf, None, False
        return buf

    def preview(self, request: RetrievalRequest, n: int) -> List[int]:
        buf = self.steal(request)  # clean: near miss, None is the only way past the relinquish
        if buf is None:
            return []
        self._search(request.query, buf)
        head = buf.items[:n]
        self.arena.relinquish(buf)
        return head

    def cancel(self, request: RetrievalRequest) -> bool:
        return self.steal(request) is not None  # leak: the stolen buffer is only compared with None

    def open_stream(self, stream_id: int) -> bool:
        if stream_id in self._streams:
            return False
        buf = self.arena.obtain()  # clean: kept per stream, close_stream relinquishes
        if buf is None:
            return False
        self._streams[stream_id] = buf
        return True

    def push(self, stream_id: int, query: List[int]) -> int:
        return self._search(query, self._streams[stream_id])

    def close_stream(self, stream_id: int) -> None:
        buf = self._streams.pop(stream_id, None)
        if buf is not None:
            self.arena.relinquish(buf)

    def close(self) -> None:
        while self.queue:
            self.finish(self.queue.popleft())
        for stream_id in list(self._streams):
            self.close_stream(stream_id)
        if self._shared is not None:
            self.arena.relinquish(self._shared)
            self._shared = None
