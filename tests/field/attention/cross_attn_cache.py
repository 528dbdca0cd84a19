# Cross-attention KV for speech models: encoder states are shared by all decodes of an utterance.
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Tuple

import torch


@dataclass
class CrossKV:
    uid: str
    k: torch.Tensor
    v: torch.Tensor
    users: int = 0


class CrossKVStore:
    def __init__(self, max_items: int):
        self._items: Dict[str, CrossKV] = {}
        self._guard = threading.RLock()
        self.max_items = max_items

    def add(self, uid: str, k: torch.Tensor, v: torch.Tensor) -> None:
        with self._guard:
            self._items[uid] = CrossKV(uid, k, v)

    def lock_entry(self, uid: str) -> Optional[CrossKV]:
        with self._guard:
            e = self._items.get(uid)
            if e is not None:
                e.users += 1
            return e

    def unlock_entry(self, e: CrossKV) -> None:
        with self._guard:
            e.users -= 1
            if e.users == 0 and len(self._items) > self.max_items:
                self._items.pop(e.uid, None)

    def stats(self) -> Tuple[int, int]:
        self._guard.acquire()  # clean: released before the tuple leaves
        n, u = len(self._items), sum(e.users for e in self._items.values())
        self._guard.release()
        return n, u

    def rename(self, old: str, new: str) -> bool:
        self._guard.acquire()  # leak: a name already taken returns with the guard held
        if new in self._items:
            return False
        e = self._items.pop(old, None)
        if e is not None:
            e.uid = new
            self._items[new] = e
        self._guard.release()
        return e is not None

    def try_trim(self) -> bool:
        if not self._guard.acquire(blocking=False):  # clean: near miss, only a granted lock reaches the finally
            return False
        try:
            for uid in [u for u, e in self._items.items() if e.users == 0]:
                del self._items[uid]
            return True
        finally:
            self._guard.release()


class DecodeStream:
    def __init__(self, store: CrossKVStore, uid: str):
        self.store = store
        self.entry = store.lock_entry(uid)  # clean: near miss, close unlocks it unless there was none
        self.tokens: List[int] = []

    def step(self, q: torch.Tensor) -> torch.Tensor:
        if self.entry is None:
            return q
        w = (q @ self.entry.k.t()).softmax(-1)
        return w @ self.entry.v

    def close(self) -> None:
        if self.entry is not None:
            self.store.unlock_entry(self.entry)
            self.entry = None


class SwitchingStream:
    def __init__(self, store: CrossKVStore):
        self.store = store
        self.entry: Optional[CrossKV] = None
        self.aux: Optional[CrossKV] = None

    def switch(self, uid: str) -> bool:
        nxt = self.store.lock_entry(uid)  # clean: takes the place of the unlocked one
        if nxt is None:
            return False
        if self.entry is not None:
            self.store.unlock_entry(self.entry)
        self.entry = nxt
        return True

    def set_aux(self, uid: str) -> None:
        self.aux = self.store.lock_entry(uid)  # leak: close never looks at aux
        if self.aux is None:
            raise KeyError(uid)

    def close(self) -> None:
        if self.entry is not None:
            self.store.unlock_entry(self.entry)
        self.entry = None
        self.aux = None


def attend_all(store: CrossKVStore, uids: Iterable[str], q: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(q)
    for uid in uids:
        e = store.lock_entry(uid)  # clean: a missing one is skipped, the others unlock
        if e is None:
            continue
        out += (q @ e.k.t()).softmax(-1) @ e.v
        store.unlock_entry(e)
    return out


def attend_longest(store: CrossKVStore, uids: Iterable[str], q: torch.Tensor) -> torch.Tensor:
    best: Optional[CrossKV] = None
    for uid in uids:
        e = store.lock_entry(uid)  # leak: a shorter best loses its name to e while it is locked
        if e is None:
            continue
        if best is None or e.k.shape[0] > best.k.shape[0]:
            best = e
        else:
            store.unlock_entry(e)
    if best is None:
        return q
    out = (q @ best.k.t()).softmax(-1) @ best.v
    store.unlock_entry(best)
    return out


def attend_shortest(store: CrossKVStore, uids: Iterable[str], q: torch.Tensor) -> torch.Tensor:
    best: Optional[CrossKV] = None
    for uid in uids:
        e = store.lock_entry(uid)  # clean: near miss, the loser of each comparison is unlocked, the winner at the end
        if e is None:
            continue
        if best is not None and e.k.shape[0] >= best.k.shape[0]:
            store.unlock_entry(e)
            continue
        if best is not None:
            store.unlock_entry(best)
        best = e
    if best is None:
        return q
    out = (q @ best.k.t()).softmax(-1) @ best.v
    store.unlock_entry(best)
    return out


def length(store: CrossKVStore, uid: str) -> int:
    e = store.lock_entry(uid)  # leak: the count of a found entry is never given up
    return 0 if e is None else e.k.shape[0]


def has(store: CrossKVStore, uid: str) -> bool:
    e = store.lock_entry(uid)  # clean: unlocked if present
    if e:
        store.unlock_entry(e)
        return True
    return False


def transcribe(store: CrossKVStore, uid: str, q: torch.Tensor, steps: int) -> torch.Tensor:
    s = DecodeStream(store, uid)  # clean: closed after the loop
    for _ in range(steps):
        q = s.step(q)
        if q.abs().max() < 1e-4:
            break
    s.close()
    return q


def score_pair(store: CrossKVStore, a: str, b: str, q: torch.Tensor) -> float:
    sa = DecodeStream(store, a)  # leak: equal names return before close
    if a == b:
        return 1.0
    sb = DecodeStream(store, b)  # clean: closed
    val = float((sa.step(q) * sb.step(q)).sum())
    sa.close()
    sb.close()
    return val
