from __future__ import annotations

import logging
import queue
import threading
from multiprocessing import shared_memory
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

logger = logging.getLogger(__name__)


class Cell(NamedTuple):
    index: int
    capacity: int


class CellBank:
    """One shared memory segment cut into equal cells."""

    def __init__(self, name: str, cells: int, capacity: int) -> None:
        self.shm = shared_memory.SharedMemory(name=name, create=True, size=cells * capacity)  # clean: closed and unlinked by shutdown
        self.capacity = capacity
        self._idle: "queue.Queue[int]" = queue.Queue()
        for i in range(cells):
            self._idle.put(i)

    def reserve(self, nbytes: int, timeout: Optional[float] = None) -> Optional[Cell]:
        try:
            index = self._idle.get(timeout=timeout)  # leak: a sample larger than a cell loses the index just taken
        except queue.Empty:
            return None
        if nbytes > self.capacity:
            return None
        return Cell(index, self.capacity)

    def reserve_now(self) -> Optional[Cell]:
        try:
            index = self._idle.get_nowait()  # clean: near miss, an empty queue gives nothing and otherwise it is handed on
        except queue.Empty:
            return None
        return Cell(index, self.capacity)

    def cancel(self, cell: Cell) -> None:
        self._idle.put(cell.index)

    def array(self, cell: Cell, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.ndarray(shape, dtype=dtype, buffer=self.shm.buf, offset=cell.index * self.capacity)

    def shutdown(self) -> None:
        self.shm.close()
        self.shm.unlink()


class Sample(NamedTuple):
    key: int
    cell: Cell
    shape: Tuple[int, ...]
    dtype: str


class PrefetchLoader:
    def __init__(self, dataset: Sequence[np.ndarray], bank: CellBank, depth: int) -> None:
        self.dataset = dataset
        self.bank = bank
        self.ready: "queue.Queue[Optional[Sample]]" = queue.Queue(maxsize=depth)
        self.stop = threading.Event()
        self.held: Dict[int, Sample] = {}
        self.corrupt: List[int] = []
        self._thread: Optional[threading.Thread] = None

    def _produce(self, order: Sequence[int]) -> None:
        for key in order:
            if self.stop.is_set():
                break
            item = self.dataset[key]
            cell = self.bank.reserve(item.nbytes, timeout=1.0)  # leak: corrupt samples continue with the cell still reserved
            if cell is None:
                continue
            if not np.isfinite(item).all():
                self.corrupt.append(key)
                continue
            self.bank.array(cell, item.shape, item.dtype)[...] = item
            self.ready.put(Sample(key, cell, item.shape, str(item.dtype)))
        self.ready.put(None)

    def start(self, order: Sequence[int]) -> None:
        self._thread = threading.Thread(target=self._produce, args=(order,), daemon=True)
        self._thread.start()

    def next_sample(self) -> Optional[Sample]:
        return self.ready.get()

    def batches(self, size: int, drop_last: bool) -> Iterator[np.ndarray]:
        rows: List[np.ndarray] = []
        while True:
            sample = self.next_sample()  # clean: near miss, copied out and cancelled before anything is yielded
            if sample is None:
                break
            rows.append(self.bank.array(sample.cell, sample.shape, sample.dtype).copy())
            self.bank.cancel(sample.cell)
            if len(rows) == size:
                yield np.stack(rows)
                rows = []
        if rows and not drop_last:
            yield np.stack(rows)

    def views(self, size: int, drop_last: bool) -> Iterator[List[np.ndarray]]:
        group: List[Sample] = []
        while True:
            sample = self.next_sample()  # leak: with drop_last the cells of the incomplete last group are not cancelled
            if sample is None:
                break
            group.append(sample)
            if len(group) == size:
                yield [self.bank.array(s.cell, s.shape, s.dtype) for s in group]
                for s in group:
                    self.bank.cancel(s.cell)
                group = []
        if group and not drop_last:
            yield [self.bank.array(s.cell, s.shape, s.dtype) for s in group]
            for s in group:
                self.bank.cancel(s.cell)

    def hold_next(self) -> Optional[int]:
        sample = self.next_sample()  # clean: near miss, kept under its key and dropped by let_go or close
        if sample is None:
            return None
        previous = self.held.pop(sample.key, None)
        if previous is not None:
            self.bank.cancel(previous.cell)
        self.held[sample.key] = sample
        return sample.key

    def let_go(self, key: int) -> None:
        sample = self.held.pop(key, None)
        if sample is not None:
            self.bank.cancel(sample.cell)

    def mean_of(self, keys: Sequence[int]) -> Optional[np.ndarray]:
        acc = self.bank.reserve_now()  # leak: an unequal shape breaks out to a return before the cancel
        if acc is None:
            return None
        first = self.dataset[keys[0]]
        view = self.bank.array(acc, first.shape, first.dtype)
        view[...] = 0
        for key in keys:
            item = self.dataset[key]
            if item.shape != first.shape:
                logger.info("sample %d has shape %s", key, item.shape)
                return None
            view += item
        result = view / len(keys)
        self.bank.cancel(acc)
        return result

    def span_of(self, keys: Sequence[int]) -> Optional[float]:
        low = self.bank.reserve_now()  # clean: near miss, the missing second cell and the end both cancel it
        if low is None:
            return None
        high = self.bank.reserve_now()  # clean: cancelled at the end
        if high is None:
            self.bank.cancel(low)
            return None
        first = self.dataset[keys[0]]
        lo = self.bank.array(low, first.shape, first.dtype)
        hi = self.bank.array(high, first.shape, first.dtype)
        lo[...] = first
        hi[...] = first
        for key in keys[1:]:
            np.minimum(lo, self.dataset[key], out=lo)
            np.maximum(hi, self.dataset[key], out=hi)
        result = float((hi - lo).max())
        self.bank.cancel(high)
        self.bank.cancel(low)
        return result

    def close(self) -> None:
        self.stop.set()
        while self._thread is not None and (self._thread.is_alive() or not self.ready.empty()):
            try:
                sample = self.ready.get(timeout=0.1)
            except queue.Empty:
                continue
            if sample is not None:
                self.bank.cancel(sample.cell)
        for key in list(self.held):
            self.let_go(key)
        self.bank.shutdown()
