"""CUDA-graph capture and replay: static input buffers per padded batch size, shared memory-pool handles."""
from __future__ import annotations

import bisect
import logging
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32]


class StaticBuffer:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.ids: List[int] = [0] * rows
        self.positions: List[int] = [0] * rows

    def fill(self, ids: List[int], positions: List[int]) -> None:
        self.ids[:len(ids)] = ids
        self.positions[:len(positions)] = positions


class GraphBufferBank:
    """checkout/checkin of static buffers, one shelf per padded size."""

    def __init__(self, per_size: int = 2) -> None:
        self._shelves: Dict[int, List[StaticBuffer]] = {
            n: [StaticBuffer(n) for _ in range(per_size)] for n in CAPTURE_SIZES
        }
        self.outstanding = 0

    def checkout(self, rows: int) -> StaticBuffer:
        size = CAPTURE_SIZES[bisect.bisect_left(CAPTURE_SIZES, rows)]
        shelf = self._shelves[size]
        if not shelf:
            raise LookupError(f"no static buffer for {size}")
        self.outstanding += 1
        return shelf.pop()

    def checkin(self, buf: StaticBuffer) -> None:
        self.outstanding -= 1
        self._shelves[buf.rows].append(buf)


class Graph:
    def __init__(self, buf: StaticBuffer, fn: Callable[[StaticBuffer], List[int]]) -> None:
        self.buf = buf
        self.fn = fn

    def replay(self) -> List[int]:
        return self.fn(self.buf)


class BufferScope:
    """``with BufferScope(bank, n) as buf``"""

    def __init__(self, bank: GraphBufferBank, rows: int) -> None:
        self.bank = bank
        self.rows = rows
        self.buf: Optional[StaticBuffer] = None

    def __enter__(self) -> StaticBuffer:
        self.buf = self.bank.checkout(self.rows)  # clean: __exit__ checks it in
        return self.buf

    def __exit__(self, exc_type, exc, tb) -> bool:
        buf, self.buf = self.buf, None
        if buf is not None:
            self.bank.checkin(buf)
        return False


class CaptureScope:
    """Capture attempt; a failing capture is logged and the caller goes on in eager mode."""

    def __init__(self, bank: GraphBufferBank, rows: int) -> None:
        self.bank = bank
        self.rows = rows
        self.failed = False

    def __enter__(self) -> "CaptureScope":
        self.buf = self.bank.checkout(self.rows)  # leak: __exit__ returns True for a failed capture before checkin
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            self.failed = True
            logger.warning("capture of %d rows failed: %s", self.rows, exc)
            return True
        self.bank.checkin(self.buf)
        return False


class ProfileScope:
    def __init__(self, bank: GraphBufferBank, rows: int, enabled: bool) -> None:
        self.bank = bank
        self.rows = rows
        self.enabled = enabled
        self.buf: Optional[StaticBuffer] = None

    def __enter__(self) -> Optional[StaticBuffer]:
        if self.enabled:
            self.buf = self.bank.checkout(self.rows)  # clean: near miss, __exit__ is guarded by the same flag
        return self.buf

    def __exit__(self, *exc: Any) -> bool:
        if not self.enabled:
            return False
        self.bank.checkin(self.buf)
        return False


@contextmanager
def maybe_borrowed(bank: GraphBufferBank, rows: int) -> Iterator[Optional[StaticBuffer]]:
    """None when the batch is too large or the shelf is empty."""
    buf = None
    if rows <= CAPTURE_SIZES[-1]:
        try:
            buf = bank.checkout(rows)  # clean: finally checks it in when there is one
        except LookupError:
            pass
    try:
        yield buf
    finally:
        if buf is not None:
            bank.checkin(buf)


class GraphRunner:
    def __init__(self, bank: GraphBufferBank, model: Callable[[StaticBuffer], List[int]]) -> None:
        self.bank = bank
        self.model = model
        self.graphs: Dict[int, Graph] = {}

    def capture_all(self) -> None:
        self.release_graphs()
        for size in reversed(CAPTURE_SIZES):
            buf = self.bank.checkout(size)  # clean: near miss, owned by the graph until release_graphs
            self.graphs[size] = Graph(buf, self.model)

    def recapture(self, size: int) -> None:
        buf = self.bank.checkout(size)  # clean: near miss, the replaced graph's buffer goes back first
        old = self.graphs.pop(size, None)
        if old is not None:
            self.bank.checkin(old.buf)
        self.graphs[size] = Graph(buf, self.model)

    def release_graphs(self) -> None:
        while self.graphs:
            _, graph = self.graphs.popitem()
            self.bank.checkin(graph.buf)

    def warmup(self, rows: int) -> bool:
        with CaptureScope(self.bank, rows) as scope:  # clean: with, the scope is at fault if anything
            self.model(scope.buf)
        return not scope.failed

    def run_profiled(self, ids: List[int], enabled: bool) -> int:
        with ProfileScope(self.bank, len(ids), enabled) as buf:  # clean: with
            if buf is None:
                return 0
            buf.fill(ids, ids)
            return len(self.model(buf))

    def run_or_fallback(self, ids: List[int], positions: List[int]) -> List[int]:
        with maybe_borrowed(self.bank, len(ids)) as buf:  # clean: with
            if buf is None:
                return [0] * len(ids)
            buf.fill(ids, positions)
            return self.model(buf)[:len(ids)]

    def run_padded(self, ids: List[int], positions: List[int]) -> List[int]:
        buf = self.bank.checkout(len(ids))  # leak: rebound to the graph's own buffer when a graph exists
        if buf.rows in self.graphs:
            graph = self.graphs[buf.rows]
            buf = graph.buf
            buf.fill(ids, positions)
            return graph.replay()[:len(ids)]
        buf.fill(ids, positions)
        out = self.model(buf)[:len(ids)]
        self.bank.checkin(buf)
        return out

    def micro_batches(self, ids: List[int], step: int) -> Iterator[List[int]]:
        for i in range(0, len(ids), step):
            chunk = ids[i:i + step]
            buf = self.bank.checkout(step)  # leak: an all-padding chunk is skipped without checkin
            buf.fill(chunk, chunk)
            if not any(chunk):
                continue
            out = self.model(buf)[:len(chunk)]
            self.bank.checkin(buf)
            yield out

    def manual_scope(self, ids: List[int]) -> List[int]:
        scope = BufferScope(self.bank, len(ids))
        buf = scope.__enter__()  # leak: empty output returns before __exit__
        buf.fill(ids, ids)
        out = self.model(buf)
        if not out:
            return []
        scope.__exit__(None, None, None)
        return out[:len(ids)]
