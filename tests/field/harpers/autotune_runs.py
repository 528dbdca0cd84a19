"""Autotuning of kernels: device lock, scratch for candidates, tuned configurations on disk."""
from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass
from typing import Callable, Iterable

import torch

log = logging.getLogger("autotune")


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    warps: int
    stages: int

    @property
    def smem(self) -> int:
        return (self.block_m + self.block_n) * 64 * 2 * self.stages


class BenchGate:
    """Only so many benchmarks at a time on a device; tickets are numbered."""

    def __init__(self, width: int = 1):
        self._width = width
        self._running: set[int] = set()
        self._next = 0
        self._cv = threading.Condition()

    def enter(self) -> int:
        with self._cv:
            self._cv.wait_for(lambda: len(self._running) < self._width)
            self._next += 1
            self._running.add(self._next)
            return self._next

    def leave(self, ticket: int) -> None:
        with self._cv:
            self._running.discard(ticket)
            self._cv.notify()


class ScratchStack:
    """Benchmark inputs. Marks nest: mark() opens a level, rewind() frees all above it."""

    def __init__(self, nbytes: int):
        self._buf = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self._top = 0
        self._marks: list[int] = []

    def mark(self) -> int:
        self._marks.append(self._top)
        return len(self._marks) - 1

    def rewind(self, level: int) -> None:
        self._top = self._marks[level]
        del self._marks[level:]

    def push(self, nbytes: int) -> torch.Tensor | None:
        if self._top + nbytes > self._buf.numel():
            return None
        view = self._buf[self._top:self._top + nbytes]
        self._top += nbytes
        return view


class ConfigFile:
    """The tuned table, guarded against other processes by a lock file."""

    def __init__(self, path: str):
        self.path = path

    def lock_table(self) -> int:
        fd = os.open(self.path + ".lock", os.O_CREAT | os.O_RDWR)  # clean: returned, closed by unlock_table
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    def unlock_table(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def read(self) -> dict[str, dict]:
        if not os.path.exists(self.path):
            return {}
        with open(self.path) as fp:  # clean: closed by with
            return json.load(fp)

    def store(self, key: str, config: Config) -> bool:
        fd = self.lock_table()  # leak: a key that is there already returns with the table locked
        table = self.read()
        if key in table:
            return False
        table[key] = asdict(config)
        with open(self.path + ".tmp", "w") as fp:  # clean: closed by with
            json.dump(table, fp)
        os.replace(self.path + ".tmp", self.path)
        self.unlock_table(fd)
        return True

    def prune(self, keep: Callable[[str], bool]) -> int:
        fd = self.lock_table()  # clean: unlocked in the finally
        try:
            table = self.read()
            kept = {k: v for k, v in table.items() if keep(k)}
            if len(kept) == len(table):
                return 0
            with open(self.path, "w") as fp:  # clean: closed by with
                json.dump(kept, fp)
            return len(table) - len(kept)
        finally:
            self.unlock_table(fd)


class Autotuner:
    def __init__(self, gate: BenchGate, scratch: ScratchStack, table: ConfigFile, smem_limit: int):
        self.gate, self.scratch, self.table = gate, scratch, table
        self.smem_limit = smem_limit

    def time_config(self, run: Callable[[Config, torch.Tensor], None], config: Config, nbytes: int) -> float:
        ticket = self.gate.enter()  # leak: no room in the scratch returns without leave
        level = self.scratch.mark()  # clean: rewound on both returns
        data = self.scratch.push(nbytes)
        if data is None:
            self.scratch.rewind(level)
            return float("inf")
        start = time.perf_counter()
        run(config, data)
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        self.scratch.rewind(level)
        self.gate.leave(ticket)
        return took

    def tune(self, run, configs: Iterable[Config], nbytes: int) -> Config | None:
        best, best_time = None, float("inf")
        for config in configs:
            if config.smem > self.smem_limit:
                continue
            level = self.scratch.mark()  # clean: near miss, the continue stands before it; rewound each turn
            data = self.scratch.push(nbytes)
            if data is not None:
                start = time.perf_counter()
                run(config, data)
                took = time.perf_counter() - start
                if took < best_time:
                    best, best_time = config, took
            self.scratch.rewind(level)
        return best

    def tune_pairs(self, run, pairs: list[tuple[Config, Config]], nbytes: int) -> int:
        """How often the second of a pair is quicker."""
        wins = 0
        outer = self.scratch.mark()  # clean: rewound at the end, with all that is above it
        for first, second in pairs:
            self.scratch.mark()  # clean: near miss, rewinding the outer level ends the inner ones too
            data = self.scratch.push(nbytes)
            if data is None:
                break
            times = []
            for config in (first, second):
                start = time.perf_counter()
                run(config, data)
                times.append(time.perf_counter() - start)
            wins += times[1] < times[0]
        self.scratch.rewind(outer)
        return wins


def tune_in_background(gate: BenchGate, work: Callable[[], None]) -> threading.Thread:
    ticket = gate.enter()  # clean: near miss, the thread's target leaves with it

    def target() -> None:
        try:
            work()
        finally:
            gate.leave(ticket)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def tune_once(gate: BenchGate, done: set[str], key: str, work: Callable[[], None]) -> bool:
    """Benchmarks a key unless another thread did so while this one waited."""
    ticket = gate.enter()  # leak: the key that is done meanwhile returns with the ticket
    if key in done:
        log.debug("%s was tuned meanwhile", key)
        return False
    work()
    done.add(key)
    gate.leave(ticket)
    return True


def append_trace(path: str, rows: list[dict], rotate: int) -> str:
    """Appends rows; a new file is begun every rotate rows."""
    part = 0
    out = open(f"{path}.{part}", "a")  # leak: the rotation binds the next file over this one
    for i, row in enumerate(rows):
        if i and i % rotate == 0:
            part += 1
            out = open(f"{path}.{part}", "a")  # clean: near miss, closed at the next rotation or at the end
        out.write(json.dumps(row) + "\n")
        if (i + 1) % rotate == 0 and part:
            out.close()
    if not out.closed:
        out.close()
    return f"{path}.{part}"
