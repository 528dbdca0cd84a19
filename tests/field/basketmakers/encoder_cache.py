"""Vision-encoder outputs kept for multimodal requests: entry references, budget permits and locks."""
from __future__ import annotations

import logging
import threading
from typing import Callable, Optional

import torch

log = logging.getLogger("mm")


class Entry:
    def __init__(self, key: str, emb: torch.Tensor):
        self.key = key
        self.emb = emb
        self.refs = 0


class EncoderCache:
    """acquire_entry() adds a reference to an entry; entries without references may be evicted."""

    def __init__(self, cap_tokens: int):
        self.cap = cap_tokens
        self.size = 0
        self._map: dict[str, Entry] = {}
        self._lock = threading.RLock()

    def acquire_entry(self, key: str) -> Optional[Entry]:
        with self._lock:
            e = self._map.get(key)
            if e is not None:
                e.refs += 1
            return e

    def insert(self, key: str, emb: torch.Tensor) -> Optional[Entry]:
        """Insert and take a reference, None if there is no room."""
        with self._lock:
            found = self.acquire_entry(key)  # clean: returned to the caller
            if found is not None:
                return found
            if not self._make_room(emb.shape[0]):
                return None
            e = self._map[key] = Entry(key, emb)
            e.refs = 1
            self.size += emb.shape[0]
            return e

    def drop_entry(self, e: Entry) -> None:
        with self._lock:
            e.refs -= 1

    def _make_room(self, n: int) -> bool:
        for key in [k for k, e in self._map.items() if e.refs == 0]:
            if self.size + n <= self.cap:
                break
            self.size -= self._map.pop(key).emb.shape[0]
        return self.size + n <= self.cap

    def try_clear(self) -> bool:
        if not self._lock.acquire(blocking=False):  # leak: entries in use return False with the lock held
            return False
        if any(e.refs for e in self._map.values()):
            return False
        self._map.clear()
        self.size = 0
        self._lock.release()
        return True


class EncodeRequest:
    def __init__(self, rid: str, keys: list[str]):
        self.rid = rid
        self.keys = keys
        self.entries: dict[str, Entry] = {}
        self.permits = 0


class EncoderScheduler:
    def __init__(self, cache: EncoderCache, encode: Callable[[str], Optional[torch.Tensor]], budget: int):
        self.cache = cache
        self.encode = encode
        self.permits = threading.Semaphore(budget)
        self.active: dict[str, EncodeRequest] = {}

    def attach(self, req: EncodeRequest) -> bool:
        self.active[req.rid] = req
        for key in req.keys:
            if key in req.entries:
                continue
            e = self.cache.acquire_entry(key)  # clean: near miss, partial progress is kept in req for detach()
            if e is None:
                return False
            req.entries[key] = e
        return True

    def detach(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        for e in req.entries.values():
            self.cache.drop_entry(e)
        req.entries.clear()
        for _ in range(req.permits):
            self.permits.release()
        req.permits = 0

    def has_all(self, keys: list[str]) -> bool:
        return all(self.cache.acquire_entry(k) is not None for k in keys)  # leak: references taken for the test are never dropped

    def lengths(self, keys: list[str]) -> list[int]:
        out = []
        for key in keys:
            e = self.cache.acquire_entry(key)  # clean: dropped on each turn
            if e is None:
                out.append(0)
                continue
            out.append(e.emb.shape[0])
            self.cache.drop_entry(e)
        return out

    def fetch(self, key: str) -> Optional[torch.Tensor]:
        e = self.cache.acquire_entry(key)  # clean: near miss, None only when nothing was taken, else dropped after the copy
        if e is None:
            emb = self.encode(key)
            return emb
        emb = e.emb.clone()
        self.cache.drop_entry(e)
        return emb

    def encode_one(self, req: EncodeRequest, key: str) -> bool:
        self.active[req.rid] = req
        if key in req.entries:
            return True
        self.permits.acquire()  # leak: encode() giving None returns before the release
        emb = self.encode(key)
        if emb is None:
            return False
        self.permits.release()
        e = self.cache.insert(key, emb)  # clean: moved into req.entries, which detach() drops
        if e is None:
            return False
        req.entries[key] = e
        return True

    def encode_charged(self, req: EncodeRequest, key: str) -> bool:
        if not self.permits.acquire(timeout=0.5):  # clean: near miss, counted in req.permits, which detach() releases
            return False
        req.permits += 1
        self.active[req.rid] = req
        emb = self.encode(key)
        return emb is not None

    def refresh(self, req: EncodeRequest, key: str, emb: torch.Tensor) -> bool:
        fresh = self.cache.insert(key + "@new", emb)  # leak: a shape mismatch returns False with the reference
        if fresh is None:
            return False
        old = req.entries.get(key)
        if old is not None and old.emb.shape != fresh.emb.shape:
            return False
        if old is not None:
            self.cache.drop_entry(old)
        req.entries[key] = fresh
        return True

    def concat(self, keys: list[str]) -> Optional[torch.Tensor]:
        held: list[Entry] = []
        try:
            for key in keys:
                e = self.cache.acquire_entry(key)  # clean: near miss, finally drops those in held
                if e is None:
                    return None
                held.append(e)
            return torch.cat([e.emb for e in held])
        finally:
            for e in held:
                self.cache.drop_entry(e)
