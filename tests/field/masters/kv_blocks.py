"""Paged KV cache: blocks with reference counts, block tables, and the scheduler that uses them."""
from __future__ import annotations

import itertools
import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

log = logging.getLogger("sched")
_ids = itertools.count()


class NoBlocks(Exception):
    pass


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    DONE = auto()


class Blocks:
    """Free list and reference counts of one device."""

    def __init__(self, n: int, name: str):
        self.name = name
        self._free = list(range(n - 1, -1, -1))
        self._ref = [0] * n

    @property
    def idle(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise NoBlocks(self.name)
        b = self._free.pop()  # clean: returned
        self._ref[b] = 1
        return b

    def share(self, b: int) -> int:
        self._ref[b] += 1
        return b

    def refs(self, b: int) -> int:
        return self._ref[b]

    def free(self, b: int) -> None:
        self._ref[b] -= 1
        if self._ref[b] == 0:
            self._free.append(b)

    def take_run(self, n: int) -> list[int] | None:
        """n neighbouring blocks, for kernels that want one base pointer."""
        self._free.sort(reverse=True)
        run: list[int] = []
        while self._free and len(run) < n:
            b = self._free.pop()  # leak: a run that breaks off is thrown away with its blocks
            if run and b != run[-1] + 1:
                run = [b]
            else:
                run.append(b)
        if len(run) < n:
            self._free.extend(run)
            return None
        for b in run:
            self._ref[b] = 1
        return run


@dataclass
class Seq:
    prompt: list[int]
    max_new: int
    id: int = field(default_factory=lambda: next(_ids))
    out: list[int] = field(default_factory=list)
    state: State = State.WAITING
    score: float = 0.0
    cpu_table: list[int] | None = None

    def __len__(self):
        return len(self.prompt) + len(self.out)

    def hashes(self, bs: int):
        toks = self.prompt + self.out
        for i in range(0, len(toks), bs):
            chunk = toks[i:i + bs]
            yield hash((i, tuple(toks[:i + bs]))) if len(chunk) == bs else None


class Tables:
    def __init__(self, n_gpu: int, n_cpu: int, bs: int = 16):
        self.bs = bs
        self.gpu, self.cpu = Blocks(n_gpu, "gpu"), Blocks(n_cpu, "cpu")
        self.tables: dict[int, list[int]] = {}
        self.by_hash: dict[int, int] = {}

    def allocate(self, seq: Seq) -> None:
        table = []
        for h in seq.hashes(self.bs):
            b = self.by_hash.get(h) if h is not None else None
            if b is not None and self.gpu.refs(b) > 0:
                table.append(self.gpu.share(b))  # leak: NoBlocks further on loses the half-built table
                continue
            b = self.gpu.take()  # leak: the same, the scheduler catches NoBlocks and knows of no table
            if h is not None:
                self.by_hash[h] = b
            table.append(b)
        self.tables[seq.id] = table

    def grow(self, seq: Seq) -> tuple[int, int] | None:
        """Room for one token. Returns (from, to) if a block must be copied first."""
        table = self.tables[seq.id]
        if (len(seq) - 1) % self.bs == 0:
            table.append(self.gpu.take())  # clean: goes into the table that free() walks
            return None
        last = table[-1]
        if self.gpu.refs(last) == 1:
            return None
        new = self.gpu.take()  # clean: near miss, replaces the shared block in the table and that one is freed
        table[-1] = new
        self.gpu.free(last)
        return last, new

    def fork(self, parent: Seq, child: Seq) -> None:
        self.tables[child.id] = [self.gpu.share(b) for b in self.tables[parent.id]]  # clean: the child's table owns them

    def free(self, seq: Seq) -> None:
        for b in self.tables.pop(seq.id, ()):
            self.gpu.free(b)

    def swap_out(self, seq: Seq) -> list[int]:
        table = self.tables[seq.id]
        if self.cpu.idle < len(table):
            raise NoBlocks("cpu")
        host = [self.cpu.take() for _ in table]  # clean: counted before, then returned
        self.free(seq)
        return host

    def swap_in(self, seq: Seq) -> bool:
        host = seq.cpu_table
        if self.gpu.idle < len(host):
            return False
        self.tables[seq.id] = [self.gpu.take() for _ in host]  # clean: near miss, there are enough, and the table owns them
        for b in host:
            self.cpu.free(b)
        seq.cpu_table = None
        return True


class Scheduler:
    def __init__(self, tables: Tables, max_batch: int = 64, watermark: float = 0.02):
        self.t, self.max_batch = tables, max_batch
        self.low = int(watermark * tables.gpu.idle)
        self.waiting: deque[Seq] = deque()
        self.running: list[Seq] = []
        self.swapped: deque[Seq] = deque()
        self.copies: list[tuple[int, int]] = []

    def add(self, seq: Seq) -> None:
        self.waiting.append(seq)

    def _admit(self) -> None:
        while self.swapped and len(self.running) < self.max_batch:
            if not self.t.swap_in(self.swapped[0]):
                return
            s = self.swapped.popleft()
            s.state = State.RUNNING
            self.running.append(s)
        while self.waiting and len(self.running) < self.max_batch:
            s = self.waiting.popleft()
            if self.t.gpu.idle <= self.low:
                self.waiting.appendleft(s)
                return
            try:
                self.t.allocate(s)  # clean: freed when the sequence finishes, is aborted or swapped out
            except NoBlocks:
                self.waiting.appendleft(s)
                return
            s.state = State.RUNNING
            self.running.append(s)

    def _preempt(self) -> bool:
        if not self.running:
            return False
        v = self.running.pop()
        try:
            v.cpu_table = self.t.swap_out(v)  # leak: abort() of a swapped sequence forgets the host blocks
            v.state = State.SWAPPED
            self.swapped.append(v)
        except NoBlocks:
            self.t.free(v)
            v.state = State.WAITING
            self.waiting.appendleft(v)
        return True

    def step(self) -> list[Seq]:
        self._admit()
        self.copies.clear()
        for s in list(self.running):
            while s in self.running:
                try:
                    if (c := self.t.grow(s)) is not None:
                        self.copies.append(c)
                    break
                except NoBlocks:
                    self._preempt()
        return list(self.running)

    def finish(self, seq: Seq) -> None:
        self.running.remove(seq)
        self.t.free(seq)
        seq.state = State.DONE

    def abort(self, seq_id: int) -> bool:
        for q in (self.waiting, self.running, self.swapped):
            for s in q:
                if s.id == seq_id:
                    q.remove(s)
                    self.t.free(s)
                    s.state = State.DONE
                    return True
        return False

    def beam(self, seq: Seq, tops: list[tuple[int, float]], width: int) -> list[Seq]:
        """Replace seq by its best continuations."""
        kids = []
        for tok, lp in tops:
            kid = Seq(seq.prompt, seq.max_new, out=seq.out + [tok], score=seq.score + lp, state=State.RUNNING)
            self.t.fork(seq, kid)  # leak: children behind the beam's width are cut off with their tables
            kids.append(kid)
        kids.sort(key=lambda k: -k.score)
        kids = kids[:width]
        self.finish(seq)
        self.running.extend(kids)
        log.debug("beam of %d: %d kept of %d", seq.id, len(kids), len(tops))
        return kids


def probe(tables: Tables, n: int) -> bool:
    """Is there a run of n? Used by the tuner only."""
    run = tables.gpu.take_run(n)  # clean: freed just below
    if run is None:
        return False
    for b in run:
        tables.gpu.free(b)
    return True
