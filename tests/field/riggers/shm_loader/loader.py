"""Trainer side: reorders what the workers send and gives batches to the training loop."""
from __future__ import annotations

import multiprocessing as mp
from typing import Callable, Iterator

import numpy as np
import torch

from .slots import SlotRef, SlotTable


class Reorderer:
    """Restores the order of the tasks; what is early is parked."""

    def __init__(self, table: SlotTable, results: mp.Queue, seq: int):
        self.table = table
        self.results = results
        self.seq = seq
        self.parked: dict[int, int] = {}
        self.want = 0

    def take_next(self) -> SlotRef:
        """The next batch in order; the caller calls done() on it."""
        while self.want not in self.parked:
            order, index, _used = self.results.get()
            if index < 0:
                index = self.table.checkout()  # clean: parked as an empty batch, given out as any other
                self.table.array(index, (self.seq,))[:] = 0
            self.parked[order] = index
        index = self.parked.pop(self.want)
        self.want += 1
        return SlotRef(self.table, index, (self.seq,))

    def stop(self) -> None:
        for index in self.parked.values():
            self.table.checkin(index)
        self.parked.clear()


class Loader:
    def __init__(self, table: SlotTable, reorder: Reorderer, to_device: Callable[[np.ndarray], torch.Tensor]):
        self.table = table
        self.reorder = reorder
        self.to_device = to_device
        self.ahead: list[SlotRef] = []
        self.replay: list[SlotRef] = []
        self.closed = False

    def batches(self, count: int) -> Iterator[torch.Tensor]:
        """Copies to the device, then frees the slot."""
        for _ in range(count):
            ref = self.reorder.take_next()  # clean: done before the yield
            batch = self.to_device(ref.array())
            ref.done()
            yield batch

    def batches_until(self, eos: int) -> Iterator[torch.Tensor]:
        while not self.closed:
            ref = self.reorder.take_next()  # leak: the batch with the end mark returns without done
            arr = ref.array()
            if arr[0] == eos:
                return
            batch = self.to_device(arr)
            ref.done()
            yield batch

    def fill_ahead(self, depth: int) -> None:
        while len(self.ahead) < depth:
            self.ahead.append(self.reorder.take_next())  # clean: done by next_ahead or close

    def next_ahead(self) -> torch.Tensor:
        ref = self.ahead.pop(0)
        batch = self.to_device(ref.array())
        ref.done()
        return batch

    def remember(self) -> torch.Tensor:
        """Keeps the last sixteen batches for a replay after a loss spike."""
        ref = self.reorder.take_next()  # leak: del replay[0] drops the oldest without done
        self.replay.append(ref)
        if len(self.replay) > 16:
            del self.replay[0]
        return self.to_device(ref.array())

    def replay_all(self) -> list[torch.Tensor]:
        out = []
        while self.replay:
            ref = self.replay.pop()
            out.append(self.to_device(ref.array()))
            ref.done()
        return out

    def fan_out(self, sinks: list[Callable[[SlotRef], None]]) -> None:
        """Every sink calls done() on what it gets."""
        ref = self.reorder.take_next()  # clean: near miss, readers equals the sinks, the last done checks in
        if not sinks:
            ref.done()
            return
        ref.readers = len(sinks)
        for sink in sinks:
            sink(ref)

    def skip(self, count: int) -> int:
        """Fast-forward after a restart."""
        tokens = 0
        for _ in range(count):
            ref = self.reorder.take_next()  # leak: only counted, never done
            tokens += int(np.count_nonzero(ref.array()))
        return tokens

    def close(self) -> None:
        self.closed = True
        for ref in self.ahead:
            ref.done()
        self.ahead = []
        self.replay_all()
        self.reorder.stop()


def merge_pair(table: SlotTable, reorder: Reorderer, seq: int) -> SlotRef:
    """Two half-full batches in one slot."""
    a = reorder.take_next()  # clean: done after the copy
    b = reorder.take_next()  # clean: done after the copy
    index = table.checkout()  # clean: handed on in the SlotRef
    out = table.array(index, (seq,))
    out[: seq // 2] = a.array()[: seq // 2]
    out[seq // 2 :] = b.array()[: seq - seq // 2]
    a.done()
    b.done()
    return SlotRef(table, index, (seq,))


def mean_merged(table: SlotTable, reorder: Reorderer, seq: int, rounds: int) -> float:
    total = 0.0
    for _ in range(rounds):
        total += float(merge_pair(table, reorder, seq).array().mean())  # leak: the merged slot is dropped
    return total / max(rounds, 1)
