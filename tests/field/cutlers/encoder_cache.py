"""Cache of vision-encoder outputs, shared between requests by reference count."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Callable, Optional


@dataclass(eq=False)
class Entry:
    key: str
    size: int
    value: bytes = b""
    refs: int = 0
    ready: bool = False


@dataclass(eq=False)
class MMRequest:
    rid: str
    images: list[str]
    entries: list[Entry] = field(default_factory=list)
    cursor: int = 0
    cancelled: bool = False


class EncoderCache:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._entries: dict[str, Entry] = {}
        self._lock = threading.RLock()

    def ref(self, key: str) -> Optional[Entry]:
        """Entry with its count raised, or None when it is not cached."""
        with self._lock:
            e = self._entries.get(key)
            if e is None:
                return None
            e.refs += 1
            return e

    def unref(self, e: Entry) -> None:
        with self._lock:
            e.refs -= 1

    def insert(self, key: str, size: int) -> Optional[Entry]:
        """A new entry with one reference held by the caller."""
        with self._lock:
            while self.used + size > self.budget:
                if not self._evict_one():
                    return None
            e = Entry(key, size, refs=1)
            self._entries[key] = e
            self.used += size
            return e

    def _evict_one(self) -> bool:
        for k, e in self._entries.items():
            if e.refs == 0:
                del self._entries[k]
                self.used -= e.size
                return True
        return False

    def ref_or_insert(self, key: str, size: int) -> tuple[Optional[Entry], bool]:
        with self._lock:
            e = self.ref(key)  # clean: returned to the caller
            if e is not None:
                return e, True
            return self.insert(key, size), False  # clean: returned to the caller

    def contains(self, key: str) -> bool:
        return self.ref(key) is not None  # leak: the count is raised for the test and never lowered

    def size_of(self, key: str) -> int:
        e = self.ref(key)  # clean: lowered before the return, None took nothing
        if e is None:
            return 0
        n = e.size
        self.unref(e)
        return n

    def prune(self, keep: Callable[[Entry], bool]) -> int:
        gone = 0
        with self._lock:
            for k in list(self._entries):
                e = self.ref(k)  # leak: an entry that is kept continues with the count raised
                if e is None or keep(e):
                    continue
                self.unref(e)
                if e.refs == 0:
                    del self._entries[k]
                    self.used -= e.size
                    gone += 1
        return gone


class EncoderRunner:
    def __init__(self, cache: EncoderCache, encode: Callable[[str], bytes]) -> None:
        self.cache = cache
        self.encode = encode
        self.default: Optional[Entry] = None

    def attach(self, req: MMRequest) -> bool:
        for img in req.images[req.cursor:]:
            e, hit = self.cache.ref_or_insert(img, len(img))  # clean: moved into the request, detach lowers it
            if e is None:
                return False
            req.entries.append(e)
            req.cursor += 1
            if not hit:
                e.value = self.encode(img)
                e.ready = True
        return True

    def attach_atomic(self, req: MMRequest) -> bool:
        taken: list[Entry] = []
        for img in req.images:
            e, hit = self.cache.ref_or_insert(img, len(img))  # leak: what was taken before is dropped when one does not fit
            if e is None:
                return False
            if not hit:
                e.value = self.encode(img)
                e.ready = True
            taken.append(e)
        req.entries.extend(taken)
        return True

    def detach(self, req: MMRequest) -> None:
        while req.entries:
            self.cache.unref(req.entries.pop())
        req.cursor = 0

    def rebuild(self, req: MMRequest, images: list[str]) -> bool:
        self.detach(req)
        req.images = images
        return self.attach(req)  # clean: near miss, the former entries are detached first, the new ones sit on the request

    def replace_image(self, req: MMRequest, i: int, img: str) -> bool:
        e, hit = self.cache.ref_or_insert(img, len(img))  # clean: near miss, stored in the request's list, the former entry is lowered
        if e is None:
            return False
        if not hit:
            e.value = self.encode(img)
            e.ready = True
        old, req.entries[i] = req.entries[i], e
        self.cache.unref(old)
        return True

    def embed_once(self, img: str) -> Optional[bytes]:
        e, hit = self.cache.ref_or_insert(img, len(img))  # leak: the way of a hit returns without unref
        if e is None:
            return None
        if hit and e.ready:
            return e.value
        e.value = self.encode(img)
        e.ready = True
        out = e.value
        self.cache.unref(e)
        return out

    def embed_retry(self, img: str, attempts: int) -> Optional[bytes]:
        for _ in range(attempts):
            e, hit = self.cache.ref_or_insert(img, len(img))  # clean: near miss, each failing turn lowers the count in finally
            if e is None:
                continue
            try:
                if not hit:
                    e.value = self.encode(img)
                    e.ready = True
                return e.value
            except ValueError:
                e.ready = False
            finally:
                self.cache.unref(e)
        return None

    def embed_many(self, imgs: list[str]) -> dict[str, bytes]:
        out: dict[str, bytes] = {}
        for img in imgs:
            e, hit = self.cache.ref_or_insert(img, len(img))  # leak: the encoder's ValueError is caught and the count stays up
            if e is None:
                break
            try:
                out[img] = e.value if hit else self.encode(img)
            except ValueError:
                continue
            e.value, e.ready = out[img], True
            self.cache.unref(e)
        return out

    def set_default(self, img: str) -> None:
        e, _ = self.cache.ref_or_insert(img, len(img))  # leak: the former default is overwritten without unref
        self.default = e

    def close(self) -> None:
        if self.default is not None:
            self.cache.unref(self.default)
            self.default = None


class RequestTable:
    def __init__(self, runner: EncoderRunner) -> None:
        self.runner = runner
        self.live: dict[str, MMRequest] = {}

    def admit(self, req: MMRequest) -> bool:
        if not self.runner.attach(req):  # clean: near miss, what was attached in part is detached
            self.runner.detach(req)
            return False
        self.live[req.rid] = req
        return True

    def admit_partial(self, req: MMRequest) -> int:
        """Chunked prefill: start with whichever images fit."""
        self.runner.attach(req)  # leak: a cancelled request returns with its entries held and is in no table
        if req.cancelled:
            return 0
        self.live[req.rid] = req
        return req.cursor

    def finish(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is not None:
            self.runner.detach(req)
