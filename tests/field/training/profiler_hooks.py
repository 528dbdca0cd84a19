from __future__ import annotations

import functools
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import nn


class RecordPool:
    def __init__(self, width: int = 128) -> None:
        self.width = width
        self.idle: List[torch.Tensor] = []

    def take_record(self) -> torch.Tensor:
        if self.idle:
            return self.idle.pop()
        return torch.zeros(self.width)

    def drop_record(self, rec: torch.Tensor) -> None:
        rec.zero_()
        self.idle.append(rec)


class ForwardProfiler:
    """Registers forward hooks and writes timings into pooled records."""

    def __init__(self, pool: RecordPool) -> None:
        self.pool = pool
        self.handles: List[Any] = []
        self.records: Dict[str, torch.Tensor] = {}
        self._cursor: Dict[str, int] = {}
        self.peaks: Dict[str, torch.Tensor] = {}

    def watch(self, name: str, module: nn.Module) -> None:
        if name in self.records:
            return
        rec = self.pool.take_record()  # clean: kept by name, unwatch_all drops it
        self.records[name] = rec
        self._cursor[name] = 0

        def hook(mod, args, out, _name=name, _rec=rec):
            i = self._cursor[_name]
            _rec[i % self.pool.width] = time.perf_counter()
            self._cursor[_name] = i + 1

        self.handles.append(module.register_forward_hook(hook))

    def unwatch_all(self) -> None:
        for h in self.handles:
            h.remove()
        self.handles.clear()
        for rec in self.records.values():
            self.pool.drop_record(rec)
        self.records.clear()
        for rec in self.peaks.values():
            self.pool.drop_record(rec)
        self.peaks.clear()

    def reset_peaks(self) -> None:
        for name in self.records:
            self.peaks[name] = self.pool.take_record()  # leak: a second reset replaces the peaks that are held by name

    def time_once(self, module: nn.Module, x: torch.Tensor) -> float:
        rec = self.pool.take_record()  # clean: near miss, the nested function only borrows it
        handle = module.register_forward_hook(lambda m, a, o: rec.__setitem__(1, time.perf_counter()))
        rec[0] = time.perf_counter()
        module(x)
        handle.remove()
        dt = float(rec[1] - rec[0])
        self.pool.drop_record(rec)
        return dt

    def time_training_only(self, module: nn.Module, x: torch.Tensor) -> Optional[float]:
        rec = self.pool.take_record()  # leak: in eval mode it returns None and keeps the record
        if not module.training:
            return None
        rec[0] = time.perf_counter()
        module(x)
        rec[1] = time.perf_counter()
        dt = float(rec[1] - rec[0])
        self.pool.drop_record(rec)
        return dt


class Span:
    def __init__(self, pool: RecordPool) -> None:
        self._rec = pool.take_record()  # clean: near miss, the finalizer drops it with the span
        self._fin = weakref.finalize(self, pool.drop_record, self._rec)

    def mark(self, i: int) -> None:
        self._rec[i] = time.perf_counter()

    def close(self) -> None:
        self._fin()


class LooseSpan:
    def __init__(self, pool: RecordPool) -> None:
        self._pool = pool
        self._rec: Optional[torch.Tensor] = pool.take_record()  # leak: close() only forgets the record

    def mark(self, i: int) -> None:
        if self._rec is not None:
            self._rec[i] = time.perf_counter()

    def close(self) -> None:
        self._rec = None


class AsyncRecorder:
    def __init__(self, pool: RecordPool, workers: int = 2) -> None:
        self.pool = pool
        self.exe = ThreadPoolExecutor(workers)

    def _finish(self, rec: torch.Tensor, fut: Future) -> None:
        self.pool.drop_record(rec)

    def submit(self, fn: Callable[[torch.Tensor], float]) -> Future:
        rec = self.pool.take_record()  # clean: near miss, the done callback drops it
        fut = self.exe.submit(fn, rec)
        fut.add_done_callback(functools.partial(self._finish, rec))
        return fut

    def submit_positive(self, fn: Callable[[torch.Tensor], float]) -> Future:
        rec = self.pool.take_record()  # leak: the callback drops it only for a positive result
        fut = self.exe.submit(fn, rec)

        def done(f: Future) -> None:
            if f.result() > 0:
                self.pool.drop_record(rec)

        fut.add_done_callback(done)
        return fut

    def submit_plain(self, fn: Callable[[torch.Tensor], float]) -> float:
        rec = self.pool.take_record()  # clean: the result is awaited and the record dropped
        value = self.exe.submit(fn, rec).result()
        self.pool.drop_record(rec)
        return value

    def submit_batch(self, fns: List[Callable[[torch.Tensor], float]]) -> List[float]:
        jobs = []
        for fn in fns:
            rec = self.pool.take_record()  # leak: the loop over the jobs reads the results and leaves the records
            jobs.append((rec, self.exe.submit(fn, rec)))
        return [fut.result() for _, fut in jobs]

    def submit_batch_tidy(self, fns: List[Callable[[torch.Tensor], float]]) -> List[float]:
        jobs = []
        for fn in fns:
            rec = self.pool.take_record()  # clean: near miss, dropped as each job is joined
            jobs.append((rec, self.exe.submit(fn, rec)))
        out = []
        for rec, fut in jobs:
            out.append(fut.result())
            self.pool.drop_record(rec)
        return out


def release_later(pool: RecordPool) -> Callable[[], None]:
    rec = pool.take_record()  # clean: the closure that is returned drops it
    rec[0] = 1.0

    def release() -> None:
        pool.drop_record(rec)

    return release


def with_warmup(pool: RecordPool, fn: Callable[[], None]) -> None:
    undo = release_later(pool)  # clean: the closure is called after fn
    fn()
    undo()


def warm_only(pool: RecordPool, fn: Callable[[], None]) -> None:
    release_later(pool)  # leak: the closure is discarded uncalled
    fn()
