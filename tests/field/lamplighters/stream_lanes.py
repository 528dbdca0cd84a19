"""Side streams for overlapping copies, and captured graphs that keep one."""
import logging
from contextlib import contextmanager
from typing import Callable, Dict, List, Optional

import torch

log = logging.getLogger("runtime.streams")


class CaptureFailed(RuntimeError):
    pass


class StreamLanes:
    def __init__(self, n: int) -> None:
        self._lanes: List["torch.cuda.Stream"] = [torch.cuda.Stream() for _ in range(n)]

    def enter(self) -> Optional["torch.cuda.Stream"]:
        return self._lanes.pop() if self._lanes else None  # clean: returned

    def enter_idle(self) -> Optional["torch.cuda.Stream"]:
        """A lane whose work has finished."""
        busy: List["torch.cuda.Stream"] = []
        try:
            while self._lanes:
                lane = self._lanes.pop()  # clean: returned, or put back from busy in the finally
                if lane.query():
                    return lane
                busy.append(lane)
            return None
        finally:
            self._lanes.extend(busy)

    def leave(self, lane: "torch.cuda.Stream") -> None:
        self._lanes.append(lane)

    @contextmanager
    def on(self):
        lane = self.enter()  # clean: None yields the current stream, any other leaves in the finally
        try:
            if lane is None:
                yield torch.cuda.current_stream()
            else:
                with torch.cuda.stream(lane):
                    yield lane
        finally:
            if lane is not None:
                self.leave(lane)


class GraphCache:
    """Captured graphs by batch size, each on a lane of its own."""

    def __init__(self, lanes: StreamLanes, limit: int = 16) -> None:
        self.lanes = lanes
        self.limit = limit
        self._graphs: Dict[int, tuple] = {}

    def _capture(self, lane, fn: Callable[[], torch.Tensor], size: int):
        if size % 8:
            raise CaptureFailed(f"batch of {size}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=lane):
            fn()
        return graph

    def capture(self, size: int, fn: Callable[[], torch.Tensor]) -> bool:
        if size in self._graphs:
            return True
        lane = self.lanes.enter()  # clean: leaves again in the handler, else goes into the table
        if lane is None:
            return False
        try:
            graph = self._capture(lane, fn, size)
        except CaptureFailed:
            self.lanes.leave(lane)
            return False
        self._graphs[size] = (graph, lane)
        return True

    def recapture(self, size: int, fn: Callable[[], torch.Tensor]) -> bool:
        lane = self.lanes.enter_idle()  # clean: takes the place of the former lane, which leaves; a failed capture lets it leave
        if lane is None:
            return False
        try:
            graph = self._capture(lane, fn, size)
        except CaptureFailed as exc:
            log.warning("kept the old graph: %s", exc)
            self.lanes.leave(lane)
            return False
        self.drop(size)
        self._graphs[size] = (graph, lane)
        return True

    def drop(self, size: int) -> None:
        _, lane = self._graphs.pop(size, (None, None))
        if lane is not None:
            self.lanes.leave(lane)


def copy_async(lanes: StreamLanes, src: torch.Tensor, dst: torch.Tensor) -> bool:
    lane = lanes.enter()  # leak: the shape check returns with the lane
    if lane is None or src.shape != dst.shape:
        return False
    with torch.cuda.stream(lane):
        dst.copy_(src, non_blocking=True)
    lanes.leave(lane)
    return True


def copy_all(lanes: StreamLanes, pairs) -> None:
    used = []
    for src, dst in pairs:
        lane = lanes.enter()  # clean: waits in used until the second loop
        if lane is None:
            dst.copy_(src)
            continue
        used.append(lane)
        with torch.cuda.stream(lane):
            dst.copy_(src, non_blocking=True)
    for lane in used:
        lane.synchronize()
        lanes.leave(lane)
