"""Adapter slots: which LoRA weights sit where in the stacked A and B tensors, and who is using them.

A slot is pinned as long as a request in the batch needs it. Unpinned slots keep their
adapter until the room is needed, oldest first.
"""
import logging
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import torch
from safetensors.torch import load_file

logger = logging.getLogger("lora")

_table: Optional["SlotTable"] = None
_base: Optional[int] = None


class NoSlot(RuntimeError):
    """Every slot is pinned."""


class AdapterMissing(RuntimeError):
    """There are no weights under that name."""


class SlotTable:
    def __init__(self, n: int, root: Path, rank: int, dim: int):
        self.a = torch.zeros(n, rank, dim, device="cuda", dtype=torch.bfloat16)
        self.b = torch.zeros(n, dim, rank, device="cuda", dtype=torch.bfloat16)
        self.root = root
        self.free = list(range(n))
        self.where: dict[str, int] = {}
        self.name_of: dict[int, str] = {}
        self.pins = [0] * n
        self.idle: OrderedDict[int, float] = OrderedDict()
        self.lock = threading.RLock()
        self.loads = 0

    def pin(self, name: str) -> int:
        with self.lock:
            slot = self.where.get(name)
            if slot is None:
                slot = self._place(name)
            self.idle.pop(slot, None)  # clean: near miss, counted as pinned from here on and idle again with the last unpin
            self.pins[slot] += 1
            return slot

    def unpin(self, slot: int) -> None:
        with self.lock:
            self.pins[slot] -= 1
            if self.pins[slot] == 0:
                self.idle[slot] = time.monotonic()

    def _place(self, name: str) -> int:
        if self.free:
            slot = self.free.pop()  # leak: AdapterMissing below, the slot is then neither free nor in a table
        elif self.idle:
            slot, _ = self.idle.popitem(last=False)  # leak: the same, an idle slot is gone when the new adapter isn't there
            del self.where[self.name_of.pop(slot)]
        else:
            raise NoSlot(name)
        path = self.root / f"{name}.safetensors"
        if not path.exists():
            raise AdapterMissing(name)
        w = load_file(path)
        self.a[slot].copy_(w["a"])
        self.b[slot].copy_(w["b"])
        self.where[name], self.name_of[slot] = slot, name
        self.loads += 1
        return slot

    def pin_many(self, names: list[str]) -> list[int]:
        got = []
        try:
            for n in names:
                got.append(self.pin(n))  # clean: near miss, unpinned again if a later one fails, else returned
        except (NoSlot, AdapterMissing):
            for s in got:
                self.unpin(s)
            raise
        return got

    def pressure(self) -> float:
        with self.lock:
            return sum(p > 0 for p in self.pins) / len(self.pins)


class AdapterRef:
    """One pin. release() may be called more than once."""

    def __init__(self, table: SlotTable, name: str):
        self.table, self.name = table, name
        self.slot: Optional[int] = table.pin(name)  # clean: release() unpins and clears it

    def release(self) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            self.table.unpin(slot)

    def __enter__(self):
        return self.slot

    def __exit__(self, *exc):
        self.release()


@dataclass
class Request:
    rid: str
    adapter: str
    tokens: list
    deadline: float
    max_new: int = 128
    ref: Optional[AdapterRef] = None
    out: list = field(default_factory=list)
    error: str = ""


class LoraScheduler:
    """Admits requests whose adapters fit, everything else waits."""

    def __init__(self, table: SlotTable, max_batch: int):
        self.table, self.max_batch = table, max_batch
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def admit(self) -> None:
        skipped = []
        while self.waiting and len(self.running) < self.max_batch:
            req = self.waiting.popleft()
            try:
                req.ref = AdapterRef(self.table, req.adapter)  # leak: expire() takes running requests out without a release
            except NoSlot:
                skipped.append(req)
                continue
            except AdapterMissing as e:
                req.error = f"no adapter {e}"
                continue
            self.running.append(req)
        self.waiting.extendleft(reversed(skipped))

    def step(self, model) -> list[Request]:
        self.admit()
        self.expire()
        if not self.running:
            return []
        toks = model.decode([r.tokens + r.out for r in self.running], [r.ref.slot for r in self.running])
        finished = []
        for r, t in zip(list(self.running), toks):
            r.out.append(t)
            if t == model.eos or len(r.out) >= r.max_new:
                self.finish(r)
                finished.append(r)
        return finished

    def finish(self, r: Request) -> None:
        self.running.remove(r)
        r.ref.release()

    def expire(self) -> None:
        now = time.monotonic()
        late = [r for r in self.running if r.deadline < now]
        for r in late:
            r.error = "deadline"
            logger.info("%s expired after %d tokens", r.rid, len(r.out))
        self.running = [r for r in self.running if r.deadline >= now]


class Prefetcher(threading.Thread):
    """Loads adapters ahead of the requests that are still in the tokenizer."""

    def __init__(self, table: SlotTable, hints: "deque[str]"):
        super().__init__(daemon=True)
        self.table, self.hints = table, hints
        self.stop = threading.Event()

    def run(self):
        while not self.stop.wait(0.01):
            if not self.hints:
                continue
            name = self.hints.popleft()
            try:
                slot = self.table.pin(name)  # leak: under pressure we go on without the unpin
            except (NoSlot, AdapterMissing):
                continue
            if self.table.pressure() > 0.9:
                logger.debug("no prefetch of %s, slots are short", name)
                continue
            torch.cuda.current_stream().synchronize()
            self.table.unpin(slot)


def delta_norm(table: SlotTable, old: str, new: str) -> Optional[float]:
    """How far two versions are apart, before a hot swap."""
    try:
        x = table.pin(old)  # leak: stays pinned when the new version is missing
        y = table.pin(new)  # clean: unpinned below
    except (NoSlot, AdapterMissing) as e:
        logger.warning("cannot compare %s with %s: %s", old, new, e)
        return None
    d = (table.b[x] @ table.a[x] - table.b[y] @ table.a[y]).norm().item()
    table.unpin(x)
    table.unpin(y)
    return d


def merged(table: SlotTable, one: str, two: str, w: float) -> torch.Tensor:
    with AdapterRef(table, one) as i, AdapterRef(table, two) as j:  # clean: both leave with the block
        return w * table.b[i] @ table.a[i] + (1 - w) * table.b[j] @ table.a[j]


def run_offline(table: SlotTable, model, prompts: dict[str, list]) -> dict[str, list]:
    names = sorted(prompts)
    slots = table.pin_many(names)  # clean: unpinned in the finally
    try:
        return {n: model.generate(prompts[n], s) for n, s in zip(names, slots)}
    finally:
        for s in slots:
            table.unpin(s)


def start(n: int, root: str, rank: int, dim: int) -> SlotTable:
    global _table, _base
    _table = SlotTable(n, Path(root), rank, dim)
    if (Path(root) / "base.safetensors").exists():
        _base = _table.pin("base")  # clean: held for the whole run and unpinned in stop()
    return _table


def stop() -> None:
    global _base
    if _base is not None:
        _table.unpin(_base)
        _base = None
