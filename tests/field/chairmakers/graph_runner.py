"""Captures the decode step into CUDA graphs, one per batch size, and replays them."""
import bisect
import logging
from collections import deque
from typing import Deque, Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class StreamsExhausted(RuntimeError):
    pass


class BuffersExhausted(RuntimeError):
    pass


class StreamPool:
    def __init__(self, count: int, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]

    def get(self) -> torch.cuda.Stream:
        if not self._streams:
            raise StreamsExhausted()
        return self._streams.pop()  # clean: handed to the caller

    def put(self, stream: torch.cuda.Stream) -> None:
        self._streams.append(stream)


class EventPool:
    def __init__(self, count: int) -> None:
        self._events: Deque[torch.cuda.Event] = deque(torch.cuda.Event(enable_timing=True) for _ in range(count))

    def __len__(self) -> int:
        return len(self._events)

    def take(self) -> Optional[torch.cuda.Event]:
        return self._events.popleft() if self._events else None  # clean: handed to the caller

    def put(self, event: torch.cuda.Event) -> None:
        self._events.append(event)


class StaticInput:
    """Addresses that a graph was captured with, or that an eager step borrows."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.ids = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.slots = torch.full_like(self.ids, -1)

    def load(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        n = ids.numel()
        self.ids[:n].copy_(ids)
        self.positions[:n].copy_(positions)
        self.slots[n:].fill_(-1)


class InputBuffers:
    def __init__(self, sizes: List[int], per_size: int, device: torch.device) -> None:
        self.sizes = sorted(sizes)
        self._idle: Dict[int, List[StaticInput]] = {
            s: [StaticInput(s, device) for _ in range(per_size)] for s in self.sizes
        }

    def checkout(self, rows: int) -> StaticInput:
        for size in self.sizes[bisect.bisect_left(self.sizes, rows):]:
            if self._idle[size]:
                return self._idle[size].pop()  # clean: near miss, checkin() goes by the rows of the buffer and not by what was asked
        raise BuffersExhausted(f"no input buffer for {rows} rows")

    def checkin(self, buf: StaticInput) -> None:
        self._idle[buf.rows].append(buf)


class CapturedGraph:
    def __init__(self, runner: "GraphRunner", graph, buf: StaticInput, out: torch.Tensor,
                 stream: torch.cuda.Stream, owns_stream: bool) -> None:
        self.runner = runner
        self.graph = graph
        self.buf = buf
        self.out = out
        self.stream = stream
        self.owns_stream = owns_stream
        self.replays = 0

    def close(self) -> None:
        self.graph = None
        self.runner.buffers.checkin(self.buf)
        if self.owns_stream:
            self.runner.streams.put(self.stream)


class GraphRunner:
    def __init__(self, model, sizes: List[int], device: torch.device) -> None:
        self.model = model
        self.sizes = sorted(sizes, reverse=True)
        self.device = device
        self.streams = StreamPool(4, device)
        self.events = EventPool(32)
        self.buffers = InputBuffers(sizes, per_size=2, device=device)
        self.graphs: Dict[int, CapturedGraph] = {}
        self.draft: Optional[CapturedGraph] = None
        self._inflight: Deque[Tuple[torch.cuda.Event, int]] = deque()

    def capture(self, rows: int, stream: Optional[torch.cuda.Stream] = None) -> Optional[CapturedGraph]:
        """A graph for this batch size, or None when the driver refuses. The caller closes it."""
        owns = stream is None
        if owns:
            stream = self.streams.get()  # clean: near miss, every exit looks at the flag, and the graph takes the flag along
        try:
            buf = self.buffers.checkout(rows)  # clean: near miss, checked in on a refused capture, else owned by the graph
        except BuffersExhausted:
            if owns:
                self.streams.put(stream)
            raise
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                out = self.model(buf.ids, buf.positions, buf.slots)
        except RuntimeError as exc:
            logger.warning("capture of %d rows failed: %s", rows, exc)
            self.buffers.checkin(buf)
            if owns:
                self.streams.put(stream)
            return None
        return CapturedGraph(self, graph, buf, out, stream, owns)

    def capture_all(self, reserve_bytes: int) -> int:
        """Largest size first, so that the smaller ones fit into the same memory pool."""
        stream = self.streams.get()  # leak: running short of memory returns without putting it back
        captured = 0
        for rows in self.sizes:
            free, _total = torch.cuda.mem_get_info(self.device)
            if free < reserve_bytes:
                logger.info("stop capturing at %d rows", rows)
                return captured
            old = self.graphs.pop(rows, None)
            if old is not None:
                old.close()
            entry = self.capture(rows, stream)  # clean: near miss, the older graph of this size was closed above and shutdown() closes this one
            if entry is None:
                continue
            self.graphs[rows] = entry
            captured += 1
        self.streams.put(stream)
        return captured

    def set_draft_depth(self, depth: int) -> None:
        """The drafter's graph depends on how many tokens it proposes."""
        self.draft = self.capture(depth)  # leak: the graph of the previous depth is rebound without close()
        logger.info("draft graph for depth %d: %s", depth, self.draft is not None)

    def _graph_for(self, rows: int) -> Optional[CapturedGraph]:
        fitting = [s for s in self.graphs if s >= rows]
        return self.graphs[min(fitting)] if fitting else None

    def step(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = ids.numel()
        entry = self._graph_for(rows)
        if entry is None:
            return self.eager(ids, positions)
        entry.buf.load(ids, positions)
        entry.graph.replay()
        entry.replays += 1
        done = self.events.take()  # leak: reap() pops an event that is not ready yet and then breaks off
        if done is not None:
            done.record()
            self._inflight.append((done, entry.replays))
        return entry.out[:rows]

    def reap(self) -> int:
        """Collects what the device has finished; called between steps."""
        finished = 0
        while self._inflight:
            event, _serial = self._inflight.popleft()
            if not event.query():
                break
            self.events.put(event)
            finished += 1
        return finished

    def eager(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        buf = self.buffers.checkout(ids.numel())  # clean: checked in by the finally
        try:
            buf.load(ids, positions)
            return self.model(buf.ids, buf.positions, buf.slots)[: ids.numel()].clone()
        finally:
            self.buffers.checkin(buf)

    def chunked_prefill(self, ids: torch.Tensor, positions: torch.Tensor, chunk: int) -> torch.Tensor:
        pieces: List[StaticInput] = []
        try:
            for lo in range(0, ids.numel(), chunk):
                piece = self.buffers.checkout(min(chunk, ids.numel() - lo))  # leak: when a later one is exhausted the handler forgets the pieces so far
                piece.load(ids[lo:lo + chunk], positions[lo:lo + chunk])
                pieces.append(piece)
        except BuffersExhausted:
            logger.debug("prefill of %d tokens goes unchunked", ids.numel())
            return self.model(ids, positions, None)
        outs = [self.model(p.ids, p.positions, p.slots) for p in pieces]
        for piece in pieces:
            self.buffers.checkin(piece)
        return torch.cat(outs)

    def overlap(self, host: torch.Tensor, device_out: torch.Tensor) -> None:
        """Copy in on one stream while the other drains results."""
        inbound = self.streams.get()  # leak: StreamsExhausted for the second stream loses the first
        outbound = self.streams.get()  # clean: put back at the end
        with torch.cuda.stream(inbound):
            staged = host.to(self.device, non_blocking=True)
        with torch.cuda.stream(outbound):
            device_out.copy_(staged[: device_out.numel()], non_blocking=True)
        torch.cuda.current_stream().wait_stream(outbound)
        self.streams.put(inbound)
        self.streams.put(outbound)

    def time_step(self, ids: torch.Tensor, positions: torch.Tensor) -> Optional[float]:
        if len(self.events) < 2:
            return None
        start = self.events.take()  # clean: near miss, two events were counted above
        end = self.events.take()  # clean: put back with the other
        start.record()
        self.model(ids, positions, None)
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end)
        self.events.put(start)
        self.events.put(end)
        return elapsed

    def shutdown(self) -> None:
        for entry in self.graphs.values():
            entry.close()
        self.graphs.clear()
        if self.draft is not None:
            self.draft.close()
            self.draft = None
