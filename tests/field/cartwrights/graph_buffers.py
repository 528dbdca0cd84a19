"""Static input buffers and memory handles for captured decode graphs."""

from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass
from typing import Optional

import torch

logger = logging.getLogger(__name__)


class CaptureFailed(RuntimeError):
    pass


class StaticBuffers:
    def __init__(self, sizes: list[int], each: int) -> None:
        self.sizes = sorted(sizes)
        self._shelf = {s: [torch.zeros(s, dtype=torch.long) for _ in range(each)] for s in sizes}

    def fit(self, batch: int) -> Optional[torch.Tensor]:
        for size in self.sizes[bisect.bisect_left(self.sizes, batch) :]:
            if self._shelf[size]:
                return self._shelf[size].pop()  # clean: returned
        return None

    def reshelve(self, buf: torch.Tensor) -> None:
        self._shelf[buf.numel()].append(buf)


class HandleTable:
    def __init__(self, count: int) -> None:
        self._vacant = set(range(count))

    def allot(self) -> int:
        if not self._vacant:
            raise CaptureFailed("no graph handle")
        return self._vacant.pop()  # clean: returned

    def cancel(self, handle: int) -> None:
        self._vacant.add(handle)


@dataclass
class Captured:
    handle: int
    ids: torch.Tensor
    batch: int


class GraphRunner:
    def __init__(self, buffers: StaticBuffers, handles: HandleTable, strict: bool = False) -> None:
        self.buffers = buffers
        self.handles = handles
        self.strict = strict
        self._graphs: dict[int, Captured] = {}

    def _record(self, ids: torch.Tensor, batch: int) -> None:
        if batch > 256 and self.strict:
            raise CaptureFailed(f"batch {batch}")
        ids.zero_()

    def capture(self, batch: int) -> Optional[Captured]:
        if batch in self._graphs:
            return self._graphs[batch]
        ids = self.buffers.fit(batch)  # leak: allot may raise for want of handles, before the try that reshelves
        if ids is None:
            return None
        handle = self.handles.allot()  # clean: cancelled when recording fails, else kept with the graph
        try:
            self._record(ids, batch)
        except CaptureFailed:
            self.handles.cancel(handle)
            self.buffers.reshelve(ids)
            return None
        graph = self._graphs[batch] = Captured(handle, ids, batch)
        return graph

    def recapture(self, batch: int) -> bool:
        old = self._graphs.pop(batch, None)
        handle = old.handle if old is not None else self.handles.allot()  # leak: a new handle is given up by the return when no buffer fits
        ids = old.ids if old is not None else self.buffers.fit(batch)  # clean: reshelved in the handler, else it goes back into the table
        if ids is None:
            return False
        try:
            self._record(ids, batch)
        except CaptureFailed:
            self.handles.cancel(handle)
            self.buffers.reshelve(ids)
            return False
        self._graphs[batch] = Captured(handle, ids, batch)
        return True

    def eager_ids(self, tokens: list[int]) -> torch.Tensor:
        ids = self.buffers.fit(len(tokens))  # leak: pad makes a longer tensor, and the shelved one is not put back
        if ids is None:
            return torch.tensor(tokens)
        ids[: len(tokens)] = torch.tensor(tokens)
        return torch.nn.functional.pad(ids, (0, 1))

    def replay(self, tokens: list[int]) -> int:
        ids = self.buffers.fit(len(tokens))  # clean: the nested condition only selects what is summed, every way reshelves
        total = 0
        if ids is not None:
            ids[: len(tokens)] = torch.tensor(tokens)
            total = int(ids.sum() if self.strict else ids[: len(tokens)].sum())
            self.buffers.reshelve(ids)
        return total

    def clear(self) -> None:
        for graph in self._graphs.values():
            self.handles.cancel(graph.handle)
            self.buffers.reshelve(graph.ids)
        self._graphs.clear()
