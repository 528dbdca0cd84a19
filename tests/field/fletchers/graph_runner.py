"""CUDA graph capture and replay with pooled streams and workspaces."""
from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


class FakeStream:

    def __init__(self, idx: int) -> None:
        self.idx = idx
        self.captured: List[int] = []


class StreamPool:

    def __init__(self, n: int) -> None:
        self._streams = [FakeStream(i) for i in range(n)]

    def get_stream(self) -> FakeStream:
        if not self._streams:
            raise RuntimeError("no stream left")
        return self._streams.pop()

    def put_stream(self, stream: FakeStream) -> None:
        self._streams.append(stream)


@dataclass
class Workspace:
    nbytes: int
    data: bytearray


class WorkspacePool:

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._idle: List[Workspace] = []

    def take(self, nbytes: int) -> Optional[Workspace]:
        for i, ws in enumerate(self._idle):
            if ws.nbytes >= nbytes:
                return self._idle.pop(i)
        if self.used + nbytes > self.limit:
            return None
        self.used += nbytes
        return Workspace(nbytes, bytearray(nbytes))

    def drop(self, ws: Workspace) -> None:
        self._idle.append(ws)


@dataclass
class CapturedGraph:
    batch: int
    workspace: Workspace
    replay: Callable[[], int]


class CaptureScope:
    """with CaptureScope(pool) as stream: ..."""

    def __init__(self, pool: StreamPool, quiet: bool = False) -> None:
        self.pool = pool
        self.quiet = quiet
        self.stream: Optional[FakeStream] = None

    def __enter__(self) -> FakeStream:
        self.stream = self.pool.get_stream()  # leak: __exit__ returns early when an exception is to be swallowed
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and self.quiet:
            logger.warning("capture failed: %s", exc)
            return True
        self.pool.put_stream(self.stream)
        self.stream = None
        return False


class ReplayScope:

    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self.stream: Optional[FakeStream] = None

    def __enter__(self) -> FakeStream:
        self.stream = self.pool.get_stream()  # clean: near miss, put back before either return of __exit__
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        stream, self.stream = self.stream, None
        self.pool.put_stream(stream)
        if exc_type is None:
            return False
        logger.error("replay: %s", exc)
        return issubclass(exc_type, RuntimeError)


class GraphRunner:

    def __init__(self, streams: StreamPool, workspaces: WorkspacePool, hidden: int = 64) -> None:
        self.streams = streams
        self.workspaces = workspaces
        self.hidden = hidden
        self.graphs: Dict[int, CapturedGraph] = {}
        self.verify_graphs: Dict[int, CapturedGraph] = {}
        self.side_stream: Optional[FakeStream] = None

    # -- capture -------------------------------------------------------

    def capture_all(self, sizes: List[int]) -> int:
        for bs in sorted(sizes, reverse=True):
            if bs in self.graphs:
                continue
            ws = self.workspaces.take(bs * self.hidden)  # clean: kept in the captured graph, reset() drops it
            if ws is None:
                logger.warning("no workspace for bs=%d", bs)
                break
            self.graphs[bs] = self._capture(bs, ws)
        return len(self.graphs)

    def capture_verify(self, bs: int, num_draft: int) -> bool:
        ws = self.workspaces.take(bs * (num_draft + 1) * self.hidden)  # leak: a second capture for bs overwrites the graph and its workspace
        if ws is None:
            return False
        self.verify_graphs[bs] = self._capture(bs, ws)
        return True

    def warm(self, bs: int) -> bool:
        captured = False
        with CaptureScope(self.streams, quiet=True) as stream:  # clean: the scope is used as meant
            self._probe(bs, stream)
            captured = True
        return captured

    def _probe(self, bs: int, stream: FakeStream) -> None:
        if bs > 512:
            raise ValueError(f"bs={bs}")
        stream.captured.append(bs)

    def recapture(self, bs: int) -> bool:
        ws = self.workspaces.take(bs * self.hidden)  # clean: near miss, the old graph's workspace is dropped first
        if ws is None:
            return False
        old = self.graphs.pop(bs, None)
        if old is not None:
            self.workspaces.drop(old.workspace)
        self.graphs[bs] = self._capture(bs, ws)
        return True

    def reset(self) -> None:
        for graphs in (self.graphs, self.verify_graphs):
            for graph in graphs.values():
                self.workspaces.drop(graph.workspace)
            graphs.clear()

    def _capture(self, bs: int, ws: Workspace) -> CapturedGraph:
        with CaptureScope(self.streams) as stream:  # clean: scope
            stream.captured.append(bs)
        return CapturedGraph(bs, ws, lambda: bs)

    # -- execution -----------------------------------------------------

    def run(self, bs: int) -> int:
        graph = self.graphs.get(bs)
        if graph is not None:
            with ReplayScope(self.streams):  # clean: scope
                return graph.replay()
        ws = self.workspaces.take(bs * self.hidden)  # clean: dropped after the eager run
        if ws is None:
            return 0
        out = self._eager(bs, ws)
        self.workspaces.drop(ws)
        return out

    def run_split(self, bs: int, micro: int) -> int:
        out = 0
        ws = self.workspaces.take(micro * self.hidden)  # leak: an uneven tail takes a second one under the same name
        if ws is None:
            return 0
        for off in range(0, bs, micro):
            n = min(micro, bs - off)
            if n < micro:
                ws = self.workspaces.take(n * self.hidden)  # clean: near miss, the last binding is what the drop after the loop sees
                if ws is None:
                    return out
            out += self._eager(n, ws)
        self.workspaces.drop(ws)
        return out

    def run_overlapped(self, bs: int) -> int:
        main = self.streams.get_stream()  # leak: the fallback without a second stream returns without putting it back
        try:
            side = self.streams.get_stream()  # clean: put back after the run
        except RuntimeError:
            return self.run(bs)
        out = self._dispatch(bs, main, side)
        self.streams.put_stream(side)
        self.streams.put_stream(main)
        return out

    def run_two_stage(self, bs: int) -> int:
        with contextlib.ExitStack() as stack:
            first = self.streams.get_stream()  # clean: near miss, registered with the exit stack
            stack.callback(self.streams.put_stream, first)
            ws = self.workspaces.take(bs * self.hidden)  # clean: near miss, registered when it is there
            if ws is None:
                return 0
            stack.callback(self.workspaces.drop, ws)
            return self._eager(bs, ws)

    def _dispatch(self, bs: int, main: FakeStream, side: FakeStream) -> int:
        main.captured.append(bs // 2)
        side.captured.append(bs - bs // 2)
        return bs

    def _eager(self, bs: int, ws: Workspace) -> int:
        return min(bs, ws.nbytes)

    # -- side stream ---------------------------------------------------

    def ensure_side_stream(self) -> FakeStream:
        if self.side_stream is None:
            self.side_stream = self.streams.get_stream()  # clean: near miss, taken once and put back by shutdown()
        return self.side_stream

    def shutdown(self) -> None:
        self.reset()
        if self.side_stream is not None:
            self.streams.put_stream(self.side_stream)
            self.side_stream = None

    def profile(self, sizes: List[int]) -> Dict[int, int]:
        peak: Dict[int, int] = {}
        for bs in sizes:
            ws = self.workspaces.take(bs * self.hidden)  # leak: break on the first size over the limit keeps it
            if ws is None:
                continue
            peak[bs] = self._eager(bs, ws)
            if peak[bs] * self.hidden > self.workspaces.limit // 2:
                break
            self.workspaces.drop(ws)
        return peak
