"""CUDA-graph decode runner: captured graphs, static input buffers and side streams.

Every captured batch size keeps its own static inputs. Buffers, streams and events are
lent by small pools so that captures and replays can be dropped and redone when an
adapter or the KV layout changes.
"""
from __future__ import annotations

import bisect
import logging
from contextlib import contextmanager
from typing import Dict, Generic, List, Optional, Tuple, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Shelf(Generic[T]):
    """Lends items it made with `make`; never more than `cap` at a time."""

    def __init__(self, make, cap: int) -> None:
        self._make = make
        self._cap = cap
        self._idle: List[T] = []
        self._out = 0

    def lend(self) -> Optional[T]:
        if self._out >= self._cap:
            return None
        self._out += 1
        if self._idle:
            return self._idle.pop()  # clean: returned to the caller
        return self._make()

    def back(self, item: T) -> None:
        self._out -= 1
        self._idle.append(item)

    def lend_matching(self, pred) -> Optional[T]:
        while self._idle:
            item = self._idle.pop()  # leak: items that do not match are popped for good
            if pred(item):
                self._out += 1
                return item
        return None


class BufferBank:
    """Static int32/half inputs by size class; sizes are rounded up to a power of two."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.banks: Dict[Tuple[int, torch.dtype], List[torch.Tensor]] = {}
        self.out = 0

    @staticmethod
    def _round(n: int) -> int:
        return 1 << max(n - 1, 0).bit_length()

    def fetch(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        bank = self.banks.setdefault((self._round(n), dtype), [])
        self.out += 1
        if bank:
            return bank.pop()  # clean: returned to the caller
        return torch.zeros(self._round(n), dtype=dtype, device=self.device)

    def file(self, t: torch.Tensor) -> None:
        self.out -= 1
        self.banks[(t.shape[0], t.dtype)].append(t)


class Capture:
    def __init__(self, bs: int, graph, ids: torch.Tensor, pos: torch.Tensor) -> None:
        self.bs = bs
        self.graph = graph
        self.ids = ids
        self.pos = pos
        self.out: Optional[torch.Tensor] = None

    def retire(self, bank: BufferBank) -> None:
        bank.file(self.ids)
        bank.file(self.pos)


class GraphRunner:
    def __init__(self, model, bank: BufferBank, streams: Shelf, events: Shelf) -> None:
        self.model = model
        self.bank = bank
        self.streams = streams
        self.events = events
        self.captures: Dict[int, Capture] = {}
        self.sizes: List[int] = []

    # -- capture -----------------------------------------------------------

    @contextmanager
    def side_stream(self):
        stream = self.streams.lend()  # clean: given back in finally when there is one
        try:
            yield stream
        finally:
            if stream is not None:
                self.streams.back(stream)

    def capture(self, bs: int) -> bool:
        if bs in self.captures:
            return True
        ids = self.bank.fetch(bs, torch.int32)  # clean: filed when no stream is left, else owned by the capture
        pos = self.bank.fetch(bs, torch.int32)  # clean: filed with ids, or retired with the capture
        with self.side_stream() as stream:  # clean: with statement
            if stream is None:
                self.bank.file(ids)
                self.bank.file(pos)
                return False
            graph = self.model.capture(ids[:bs], pos[:bs], stream)
        self.captures[bs] = Capture(bs, graph, ids, pos)
        bisect.insort(self.sizes, bs)
        return True

    def capture_with_lora(self, bs: int, adapter) -> Optional[Capture]:
        ids = self.bank.fetch(bs, torch.int32)  # clean: filed or owned by the returned capture
        pos = self.bank.fetch(bs, torch.int32)  # leak: only ids is filed when the adapter does not support graphs
        if not adapter.graph_safe:
            self.bank.file(ids)
            return None
        graph = self.model.capture(ids[:bs], pos[:bs], None, adapter=adapter)
        return Capture(bs, graph, ids, pos)

    def recapture(self, bs: int, adapter) -> bool:
        cap = self.capture_with_lora(bs, adapter)  # clean: near miss, takes the place of a capture that is retired
        if cap is None:
            return False
        old = self.captures.get(bs)
        self.captures[bs] = cap
        if old is None:
            bisect.insort(self.sizes, bs)
        else:
            old.retire(self.bank)
        return True

    def try_adapters(self, bs: int, adapters) -> Optional[Capture]:
        """The first adapter whose captured graph passes the smoke run."""
        for adapter in adapters:
            cap = self.capture_with_lora(bs, adapter)  # leak: a capture that fails the smoke run is not retired
            if cap is None:
                continue
            if self.model.smoke(cap.graph):
                return cap
        return None

    def invalidate(self) -> None:
        for cap in self.captures.values():
            cap.retire(self.bank)
        self.captures.clear()
        self.sizes.clear()

    # -- replay ------------------------------------------------------------

    def replay(self, ids: torch.Tensor, pos: torch.Tensor) -> Optional[torch.Tensor]:
        at = bisect.bisect_left(self.sizes, ids.shape[0])
        if at == len(self.sizes):
            return self._eager(ids, pos)
        cap = self.captures[self.sizes[at]]
        cap.ids[: ids.shape[0]].copy_(ids)
        cap.pos[: pos.shape[0]].copy_(pos)
        return self.model.replay(cap.graph)[: ids.shape[0]]

    def _eager(self, ids: torch.Tensor, pos: torch.Tensor) -> Optional[torch.Tensor]:
        work = self.bank.fetch(ids.shape[0], torch.float16)  # clean: filed after the forward made its own output
        out = self.model.forward(ids, pos, work)
        self.bank.file(work)
        return out

    def overlap_copy(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        stream = self.streams.lend()  # leak: not given back when there is no event
        if stream is None:
            return False
        event = self.events.lend()  # clean: given back after the wait
        if event is None:
            dst.copy_(src)
            return False
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
            event.record(stream)
        event.synchronize()
        self.events.back(event)
        self.streams.back(stream)
        return True

    def profile(self, bs: int, rounds: int) -> Optional[float]:
        begin = self.events.lend()  # leak: not given back when the size was never captured
        if begin is None:
            return None
        end = self.events.lend()  # leak: not given back when the size was never captured
        if end is None:
            self.events.back(begin)
            return None
        cap = self.captures.get(bs)
        if cap is None:
            return None
        begin.record()
        for _ in range(rounds):
            self.model.replay(cap.graph)
        end.record()
        end.synchronize()
        ms = begin.elapsed_time(end) / rounds
        self.events.back(begin)
        self.events.back(end)
        return ms

    def close(self) -> None:
        self.invalidate()


def sweep(runner: GraphRunner, sizes: List[int]) -> Dict[int, bool]:
    result: Dict[int, bool] = {}
    for bs in sizes:
        probe = runner.bank.fetch(bs, torch.int32)  # leak: continue on an uncaptured size skips filing the probe
        if bs not in runner.captures:
            result[bs] = False
            continue
        probe.fill_(1)
        result[bs] = runner.replay(probe[:bs], probe[:bs]) is not None
        runner.bank.file(probe)
    return result
