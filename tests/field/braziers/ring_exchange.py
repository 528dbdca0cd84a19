"""Ring attention: KV shards travel round the ranks through a table of transfer slots."""
from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Callable, Optional

import torch

log = logging.getLogger(__name__)


class SlotTable:
    """Numbered transfer slots; every slot owns a send and a receive buffer."""

    def __init__(self, n: int, shape: tuple[int, ...]) -> None:
        self._bits = [False] * n
        self._cv = threading.Condition()
        self.buffers = [torch.empty(shape) for _ in range(n)]

    def claim(self, timeout: Optional[float] = None) -> Optional[int]:
        with self._cv:
            if not self._cv.wait_for(lambda: not all(self._bits), timeout):
                return None
            idx = self._bits.index(False)
            self._bits[idx] = True
            return idx

    def vacate(self, idx: int) -> None:
        with self._cv:
            self._bits[idx] = False
            self._cv.notify()


@dataclass
class Transfer:
    seq: int
    slot: int
    peer: int
    deadline: float


class Wire:
    """In-process stand-in for the NIC queue pair."""

    def __init__(self) -> None:
        self._q: "queue.Queue[tuple[int, torch.Tensor]]" = queue.Queue()

    def put(self, peer: int, t: torch.Tensor) -> bool:
        self._q.put((peer, t))
        return self._q.qsize() < 64

    def get(self, timeout: float) -> Optional[torch.Tensor]:
        try:
            return self._q.get(timeout=timeout)[1]
        except queue.Empty:
            return None


class RingSender:
    """Posts shards; a slot stays taken until the peer acknowledges or the send expires."""

    def __init__(self, table: SlotTable, wire: Wire, peer: int) -> None:
        self._table = table
        self._wire = wire
        self._peer = peer
        self._seq = 0
        self._inflight: dict[int, Transfer] = {}

    def post(self, shard: torch.Tensor) -> Optional[int]:
        slot = self._table.claim(timeout=1.0)  # clean: near miss, vacated by on_ack or expire
        if slot is None:
            return None
        self._seq += 1
        self._table.buffers[slot].copy_(shard)
        self._wire.put(self._peer, self._table.buffers[slot])
        self._inflight[self._seq] = Transfer(self._seq, slot, self._peer, time.monotonic() + 5.0)
        return self._seq

    def on_ack(self, seq: int) -> None:
        transfer = self._inflight.pop(seq, None)
        if transfer is not None:
            self._table.vacate(transfer.slot)

    def expire(self) -> int:
        now = time.monotonic()
        late = [t for t in self._inflight.values() if t.deadline < now]
        for t in late:
            del self._inflight[t.seq]
            self._table.vacate(t.slot)
        return len(late)


class CreditSender:
    """Windowed variant: at most ``window`` transfers outstanding, acknowledged in order."""

    def __init__(self, table: SlotTable, wire: Wire, peer: int, window: int = 4) -> None:
        self._table = table
        self._wire = wire
        self._peer = peer
        self._window = window
        self._order: deque[Transfer] = deque()

    def post(self, seq: int, shard: torch.Tensor) -> bool:
        if len(self._order) >= self._window:
            return False
        slot = self._table.claim()  # leak: ack() pops the transfer and never vacates its slot
        self._table.buffers[slot].copy_(shard)
        self._wire.put(self._peer, self._table.buffers[slot])
        self._order.append(Transfer(seq, slot, self._peer, time.monotonic() + 5.0))
        return True

    def ack(self, upto: int) -> int:
        done = 0
        while self._order and self._order[0].seq <= upto:
            transfer = self._order.popleft()
            log.debug("peer %d acked %d", transfer.peer, transfer.seq)
            done += 1
        return done


def _online_merge(acc: torch.Tensor, part: torch.Tensor, step: int) -> torch.Tensor:
    return acc + (part - acc) / (step + 1)


def ring_pass(table: SlotTable, wire: Wire, rank: int, world: int, kv: torch.Tensor) -> torch.Tensor:
    acc = kv.clone()
    slot = table.claim()  # leak: slot 0 is falsy and never vacated
    for step in range(world - 1):
        table.buffers[slot].copy_(acc)
        wire.put((rank + 1) % world, table.buffers[slot])
        got = wire.get(timeout=2.0)
        if got is not None:
            acc = _online_merge(acc, got, step)
    if slot:
        table.vacate(slot)
    return acc


def ring_pass_optional(table: SlotTable, wire: Wire, rank: int, world: int, kv: torch.Tensor) -> torch.Tensor:
    acc = kv.clone()
    slot = table.claim(timeout=0.5)  # clean: near miss, tested against None before the vacate
    for step in range(world - 1):
        if slot is not None:
            table.buffers[slot].copy_(acc)
            wire.put((rank + 1) % world, table.buffers[slot])
        else:
            wire.put((rank + 1) % world, acc.clone())
        got = wire.get(timeout=2.0)
        if got is None:
            break
        acc = _online_merge(acc, got, step)
    if slot is not None:
        table.vacate(slot)
    return acc


def exchange_pair(table: SlotTable, wire: Wire, peer: int, k: torch.Tensor, v: torch.Tensor) -> bool:
    ks = table.claim(timeout=0.1)  # leak: kept when there is no slot for v
    if ks is None:
        return False
    vs = table.claim(timeout=0.1)  # clean: vacated at the end
    if vs is None:
        log.info("no slot for v, peer %d falls back", peer)
        return False
    table.buffers[ks].copy_(k)
    table.buffers[vs].copy_(v)
    ok = wire.put(peer, table.buffers[ks]) and wire.put(peer, table.buffers[vs])
    table.vacate(vs)
    table.vacate(ks)
    return ok


def exchange_pair_strict(table: SlotTable, wire: Wire, peer: int, k: torch.Tensor, v: torch.Tensor) -> bool:
    taken: list[int] = []
    try:
        for t in (k, v):
            slot = table.claim(timeout=0.1)  # clean: near miss, collected in taken, vacated by the finally
            if slot is None:
                return False
            taken.append(slot)
            table.buffers[slot].copy_(t)
        return all(wire.put(peer, table.buffers[s]) for s in taken)
    finally:
        for s in taken:
            table.vacate(s)


def send_with_retry(table: SlotTable, wire: Wire, peer: int, t: torch.Tensor, tries: int = 3) -> bool:
    for attempt in range(tries):
        slot = table.claim()  # leak: a refused attempt claims anew without vacating
        table.buffers[slot].copy_(t)
        if wire.put(peer, table.buffers[slot]):
            table.vacate(slot)
            return True
        time.sleep(0.01 * 2 ** attempt)
    return False


def send_with_backoff(table: SlotTable, wire: Wire, peer: int, t: torch.Tensor, tries: int = 3) -> bool:
    for attempt in range(tries):
        slot = table.claim()  # clean: vacated in each turn before the outcome is looked at
        table.buffers[slot].copy_(t)
        ok = wire.put(peer, table.buffers[slot])
        table.vacate(slot)
        if ok:
            return True
        time.sleep(0.01 * 2 ** attempt)
    return False


class Receiver(threading.Thread):
    def __init__(self, table: SlotTable, wire: Wire, sink: Callable[[torch.Tensor], None]) -> None:
        super().__init__(daemon=True, name="ring-recv")
        self._table = table
        self._wire = wire
        self._sink = sink
        self._stop = threading.Event()

    def run(self) -> None:
        while not self._stop.is_set():
            slot = self._table.claim(timeout=0.2)  # leak: an idle turn continues without vacating
            if slot is None:
                continue
            got = self._wire.get(timeout=0.2)
            if got is None:
                continue
            self._table.buffers[slot].copy_(got)
            self._sink(self._table.buffers[slot].clone())
            self._table.vacate(slot)

    def shutdown(self) -> None:
        self._stop.set()
        self.join()
