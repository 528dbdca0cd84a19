"""LoRA adapters in a fixed number of GPU slots, pinned while a batch uses them."""
from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Deque, Iterator, List, Optional, Protocol, Tuple

import torch


class AdapterMissing(KeyError):
    """The store does not know the adapter."""


class SlotsBusy(RuntimeError):
    """Every slot is pinned."""


class Store(Protocol):
    def fetch(self, aid: str) -> torch.Tensor: ...
    def rank(self, aid: str) -> int: ...


@dataclass(eq=False)
class Entry:
    aid: str
    slot: int
    rank: int
    pins: int = 0
    loaded_at: float = 0.0


class AdapterSlots:
    def __init__(self, bank: torch.Tensor, store: Store) -> None:
        self.bank, self.store = bank, store
        self._free: List[int] = list(range(bank.shape[0]))
        self._resident: "OrderedDict[str, Entry]" = OrderedDict()
        self._lock = threading.RLock()
        self.evictions = 0

    def _evict(self) -> int:
        """Slot of the oldest adapter that nobody has pinned."""
        for aid, entry in self._resident.items():
            if entry.pins == 0:
                del self._resident[aid]
                self.evictions += 1
                return entry.slot
        raise SlotsBusy(f"{len(self._resident)} adapters are pinned")

    def _load(self, aid: str) -> Entry:
        if self._free:
            slot = self._free.pop()  # leak: an adapter that the store does not know raises before the entry exists
        else:
            slot = self._evict()  # leak: an adapter that the store does not know raises before the entry exists
        weights = self.store.fetch(aid)
        if weights is None:
            raise AdapterMissing(aid)
        self.bank[slot, : weights.numel()].copy_(weights.flatten())
        return Entry(aid, slot, self.store.rank(aid), loaded_at=time.time())

    def pin(self, aid: str) -> Entry:
        with self._lock:
            entry = self._resident.get(aid)
            if entry is None:
                entry = self._load(aid)  # clean: near miss, resident until it is evicted or dropped
                self._resident[aid] = entry
            self._resident.move_to_end(aid)
            entry.pins += 1
            return entry

    def unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.pins -= 1

    def refresh(self, aid: str) -> None:
        """A new version of the adapter was published: load it next to the old one and switch over."""
        with self._lock:
            fresh = self._load(aid)  # clean: near miss, takes over the key; the slot of the old entry is freed, or kept under another key while pinned
            old = self._resident.get(aid)
            self._resident[aid] = fresh
            if old is not None and old.pins:
                self._resident[f"{aid}@{old.loaded_at}"] = old
            elif old is not None:
                self._free.append(old.slot)

    def drop(self, aid: str) -> bool:
        with self._lock:
            entry = self._resident.get(aid)
            if entry is None or entry.pins:
                return False
            del self._resident[aid]
            self._free.append(entry.slot)
            return True

    @contextlib.contextmanager
    def pinned(self, aid: str) -> Iterator[Entry]:
        entry = self.pin(aid)  # clean: unpinned in finally
        try:
            yield entry
        finally:
            self.unpin(entry)


class Request:
    def __init__(self, rid: int, aid: Optional[str], tokens: List[int]) -> None:
        self.rid, self.aid, self.tokens = rid, aid, tokens
        self.entry: Optional[Entry] = None
        self.error: Optional[str] = None

    def finish(self, slots: AdapterSlots, error: Optional[str] = None) -> None:
        self.error = error
        entry, self.entry = self.entry, None
        if entry is not None:
            slots.unpin(entry)


class Batcher:
    def __init__(self, slots: AdapterSlots, max_rank: int, max_batch: int) -> None:
        self.slots, self.max_rank, self.max_batch = slots, max_rank, max_batch
        self.queue: Deque[Request] = deque()
        self.running: List[Request] = []

    def schedule(self) -> List[Request]:
        picked: List[Request] = []
        while self.queue and len(picked) < self.max_batch:
            req = self.queue.popleft()
            if req.aid is not None:
                try:
                    entry = self.slots.pin(req.aid)  # leak: a request of too high a rank is refused before it owns the entry
                except AdapterMissing:
                    req.finish(self.slots, "no such adapter")
                    continue
                except SlotsBusy:
                    self.queue.appendleft(req)
                    break
                if entry.rank > self.max_rank:
                    req.finish(self.slots, f"rank {entry.rank} is not served")
                    continue
                req.entry = entry
            picked.append(req)
        self.running += picked
        return picked

    def rejoin(self, req: Request) -> bool:
        """A preempted request comes back; it may have kept its pin."""
        if req.entry is None and req.aid is not None:
            try:
                req.entry = self.slots.pin(req.aid)  # clean: near miss, owned by the request, finish() unpins
            except (AdapterMissing, SlotsBusy) as exc:
                req.finish(self.slots, str(exc))
                return False
        self.running.append(req)
        return True

    def complete(self, done: List[Request]) -> None:
        for req in done:
            self.running.remove(req)
            req.finish(self.slots)

    def shutdown(self) -> None:
        for req in self.running:
            req.finish(self.slots, "shutdown")
        self.running.clear()


class Warmer:
    """Keeps recently wanted adapters from being evicted."""

    def __init__(self, slots: AdapterSlots, keep: int = 8) -> None:
        self.slots = slots
        self.recent: Deque[Entry] = deque(maxlen=keep)
        self.forever: List[Entry] = []

    def touch(self, aid: str) -> None:
        try:
            self.recent.append(self.slots.pin(aid))  # leak: the bounded deque lets the oldest entry fall off without unpin
        except (AdapterMissing, SlotsBusy):
            pass

    def keep_forever(self, aids: List[str]) -> int:
        for aid in aids:
            try:
                entry = self.slots.pin(aid)  # clean: kept in the list until stop()
            except SlotsBusy:
                break
            except AdapterMissing:
                continue
            self.forever.append(entry)
        return len(self.forever)

    def stop(self) -> None:
        for entry in [*self.recent, *self.forever]:
            self.slots.unpin(entry)
        self.recent.clear()
        self.forever.clear()


class MergeJob:
    """Linear merge of several adapters, run off the hot path."""

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self.stack = contextlib.ExitStack()

    def open(self, aids: List[str]) -> List[Entry]:
        with contextlib.ExitStack() as tmp:
            entries = []
            for aid in aids:
                entry = self.slots.pin(aid)  # clean: near miss, tmp unpins when a later one raises, else pop_all() moves it to close()
                tmp.callback(self.slots.unpin, entry)
                entries.append(entry)
            self.stack = tmp.pop_all()
        return entries

    def close(self) -> None:
        self.stack.close()


def merge(slots: AdapterSlots, aids: List[str], weights: List[float]) -> Optional[torch.Tensor]:
    job = MergeJob(slots)
    try:
        entries = job.open(aids)  # clean: the job is closed in finally
        return sum(w * slots.bank[e.slot] for w, e in zip(weights, entries))
    except AdapterMissing:
        return None
    finally:
        job.close()


def similarity(slots: AdapterSlots, pairs: List[Tuple[str, str]]) -> List[float]:
    out = []
    for left, right in pairs:
        try:
            a, b = slots.pin(left), slots.pin(right)  # leak: when the right one is missing the left one stays pinned
        except AdapterMissing:
            out.append(float("nan"))
            continue
        out.append(float(torch.cosine_similarity(slots.bank[a.slot], slots.bank[b.slot], dim=0)))
        slots.unpin(a)
        slots.unpin(b)
    return out


def benchmark(slots: AdapterSlots, aid: str, x: torch.Tensor, rounds: int = 10) -> float:
    with slots.pinned(aid) as entry:  # clean: the context manager unpins
        t0 = time.perf_counter()
        for _ in range(rounds):
            x @ slots.bank[entry.slot, : x.shape[-1]].view(-1, 1)
        return (time.perf_counter() - t0) / rounds
