"""CUDA graph runner: static input buffers, side streams, capture scopes."""
import contextlib
from typing import Optional

import torch


class BufferBank:
    """Static graph inputs; bit i of the mask is set while buffer i is checked out."""

    def __init__(self, count: int, tokens: int) -> None:
        self.count = count
        self.mask = 0
        self.buffers = [torch.zeros(tokens, dtype=torch.long) for _ in range(count)]

    def check_out(self) -> Optional[int]:
        for i in range(self.count):
            if not self.mask >> i & 1:
                self.mask |= 1 << i
                return i
        return None

    def check_in(self, i: int) -> None:
        self.mask &= ~(1 << i)

    @contextlib.contextmanager
    def loan(self):
        i = self.check_out()  # clean: near miss, checked in by finally unless None
        try:
            yield i
        finally:
            if i is not None:
                self.check_in(i)

    @contextlib.contextmanager
    def loan_filled(self, tokens: torch.Tensor):
        i = self.check_out()  # leak: oversized input yields None and never checks in
        if i is None or tokens.numel() > self.buffers[i].numel():
            yield None
            return
        self.buffers[i][: tokens.numel()].copy_(tokens)
        try:
            yield i
        finally:
            self.check_in(i)


class StreamYard:
    def __init__(self, count: int) -> None:
        self._parked = {torch.cuda.Stream() for _ in range(count)}

    def depart(self) -> torch.cuda.Stream:
        return self._parked.pop()

    def park(self, stream: torch.cuda.Stream) -> None:
        self._parked.add(stream)


class CaptureScope:
    """Holds one side stream and one buffer for the time of a capture."""

    def __init__(self, yard: StreamYard, bank: BufferBank) -> None:
        self.yard, self.bank = yard, bank
        self.stream = None
        self.slot: Optional[int] = None

    def __enter__(self) -> "CaptureScope":
        self.stream = self.yard.depart()  # clean: parked first thing in __exit__
        self.slot = self.bank.check_out()  # leak: __exit__ returns early on an exception it swallows
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.yard.park(self.stream)
        if exc_type is torch.cuda.OutOfMemoryError:
            return True
        if self.slot is not None:
            self.bank.check_in(self.slot)
        return False


class GraphRunner:
    def __init__(self, model, bank: BufferBank, yard: StreamYard) -> None:
        self.model = model
        self.bank = bank
        self.yard = yard
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, int]] = {}
        self.copy_stream = yard.depart()  # clean: near miss, close() parks it under a helper
        self.sample_stream = yard.depart()  # leak: close() parks only the copy stream

    def capture(self, batch: int) -> bool:
        if batch in self.graphs:
            return True
        slot = self.bank.check_out()  # clean: near miss, a failed capture checks in, else kept in graphs
        if slot is None:
            return False
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.model(self.bank.buffers[slot][:batch])
        except RuntimeError:
            self.bank.check_in(slot)
            return False
        self.graphs[batch] = (graph, slot)
        return True

    def recapture(self, batch: int) -> None:
        """Capture again after a weight update."""
        slot = self.bank.check_out()  # leak: replaced entry's buffer is never checked in
        if slot is None:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.model(self.bank.buffers[slot][:batch])
        self.graphs[batch] = (graph, slot)

    def run_eager(self, tokens: torch.Tensor) -> Optional[torch.Tensor]:
        with self.bank.loan() as slot:  # clean: near miss, early return leaves through the with
            if slot is None:
                return None
            static = self.bank.buffers[slot][: tokens.numel()]
            static.copy_(tokens)
            return self.model(static).clone()

    def run_padded(self, tokens: torch.Tensor, width: int) -> torch.Tensor:
        stack = contextlib.ExitStack()
        slot = self.bank.check_out()  # clean: near miss, checked in when the stack closes
        if slot is None:
            return self.model(tokens)
        stack.callback(self.bank.check_in, slot)
        with stack:
            static = self.bank.buffers[slot]
            static[tokens.numel():width].zero_()
            static[: tokens.numel()].copy_(tokens)
            return self.model(static[:width])[: tokens.numel()].clone()

    def overlap_copy(self, source: torch.Tensor, sink: torch.Tensor) -> bool:
        stream = self.yard.depart()  # leak: an empty source returns with the stream out
        if source.numel() == 0:
            return False
        with torch.cuda.stream(stream):
            sink.copy_(source, non_blocking=True)
        stream.synchronize()
        self.yard.park(stream)
        return True

    def forget(self, batch: int) -> None:
        _graph, slot = self.graphs.pop(batch)
        self.bank.check_in(slot)

    def _park_all(self, *streams: torch.cuda.Stream) -> None:
        for stream in streams:
            self.yard.park(stream)

    def close(self) -> None:
        for batch in list(self.graphs):
            self.forget(batch)
        self._park_all(self.copy_stream)
