"""Checkpoint shard cache on local NVMe. Fixed number of slot files, each leased to one shard at a time."""
import hashlib
import logging
import os
import shutil
from collections import OrderedDict
from typing import BinaryIO, Dict, List, Optional, Set

logger = logging.getLogger(__name__)


class SlotDir:
    """Slots are numbered files under root; free numbers live in a set."""

    def __init__(self, root: str, nslots: int):
        self.root = root
        self._vacant: Set[int] = set(range(nslots))

    def path(self, slot: int) -> str:
        return os.path.join(self.root, f"slot{slot:04d}.bin")

    def occupy(self) -> int:
        if not self._vacant:
            raise LookupError("cache is full")
        return self._vacant.pop()

    def occupy_or(self, default: int = -1) -> int:
        try:
            return self.occupy()  # clean: returned to the caller
        except LookupError:
            return default

    def vacate(self, slot: int) -> None:
        self._vacant.add(slot)

    def occupy_clean(self) -> int:
        slot = self.occupy()  # clean: vacated when the stale file cannot be removed
        try:
            if os.path.exists(self.path(slot)):
                os.unlink(self.path(slot))
        except OSError:
            self.vacate(slot)
            raise
        return slot


class HandleTable:
    """Caps open files; a handle must go back through put()."""

    def __init__(self, cap: int):
        self.cap = cap
        self.open_count = 0

    def grab(self, path: str, mode: str = "rb") -> Optional[BinaryIO]:
        if self.open_count >= self.cap:
            return None
        f = open(path, mode)
        self.open_count += 1
        return f

    def put(self, f: BinaryIO) -> None:
        f.close()
        self.open_count -= 1


class ShardCache:
    def __init__(self, slots: SlotDir, handles: HandleTable):
        self.slots = slots
        self.handles = handles
        self._lru: "OrderedDict[str, int]" = OrderedDict()
        self._digests: Dict[str, str] = {}
        self._warm: Dict[str, BinaryIO] = {}

    def _evict_one(self) -> bool:
        if not self._lru:
            return False
        name, slot = self._lru.popitem(last=False)
        self._digests.pop(name, None)
        self.slots.vacate(slot)
        return True

    def _slot_for(self, name: str) -> int:
        slot = self.slots.occupy_or(-1)  # clean: near miss, rebound only when it is -1
        while slot < 0:
            if not self._evict_one():
                raise LookupError(name)
            slot = self.slots.occupy_or(-1)  # clean: returned once it is a real slot
        return slot

    def insert(self, name: str, src: str) -> bool:
        slot = self._slot_for(name)  # clean: vacated on copy failure, else kept in _lru
        try:
            shutil.copyfile(src, self.slots.path(slot))
        except OSError as e:
            logger.warning("copy of %s failed: %s", name, e)
            self.slots.vacate(slot)
            return False
        old = self._lru.pop(name, None)
        if old is not None:
            self.slots.vacate(old)
        self._lru[name] = slot
        return True

    def insert_verified(self, name: str, src: str, want: str) -> bool:
        slot = self._slot_for(name)  # leak: digest mismatch unlinks the file but does not vacate the slot
        shutil.copyfile(src, self.slots.path(slot))
        got = self._digest_path(self.slots.path(slot))
        if got != want:
            os.unlink(self.slots.path(slot))
            return False
        old = self._lru.pop(name, None)
        if old is not None:
            self.slots.vacate(old)
        self._lru[name] = slot
        self._digests[name] = got
        return True

    def refresh(self, name: str, src: str) -> None:
        slot = self.slots.occupy_clean()  # clean: near miss, swapped with the old slot, which is vacated
        shutil.copyfile(src, self.slots.path(slot))
        slot, self._lru[name] = self._lru.get(name, -1), slot
        if slot >= 0:
            self.slots.vacate(slot)

    def bulk_insert(self, files: Dict[str, str]) -> int:
        n = 0
        for name, src in files.items():
            slot = self.slots.occupy_or(-1)  # leak: missing source file continues with the slot occupied
            if slot < 0:
                break
            if not os.path.exists(src):
                logger.info("skip %s", name)
                continue
            shutil.copyfile(src, self.slots.path(slot))
            prev = self._lru.pop(name, None)
            if prev is not None:
                self.slots.vacate(prev)
            self._lru[name] = slot
            n += 1
        return n

    def _digest_path(self, path: str) -> str:
        h = hashlib.sha256()
        f = self.handles.grab(path)  # clean: put back in finally
        if f is None:
            return ""
        try:
            for chunk in iter(lambda: f.read(1 << 20), b""):
                h.update(chunk)
        finally:
            self.handles.put(f)
        return h.hexdigest()

    def head(self, name: str, n: int = 64) -> Optional[bytes]:
        slot = self._lru.get(name)
        if slot is None:
            return None
        f = self.handles.grab(self.slots.path(slot))  # leak: short file returns None before put
        if f is None:
            return None
        data = f.read(n)
        if len(data) < n:
            return None
        self.handles.put(f)
        return data

    def tail(self, name: str, n: int = 64) -> Optional[bytes]:
        slot = self._lru.get(name)
        if slot is None:
            return None
        f = self.handles.grab(self.slots.path(slot))  # clean: near miss, put before the length check
        if f is None:
            return None
        f.seek(0, os.SEEK_END)
        f.seek(max(0, f.tell() - n))
        data = f.read()
        self.handles.put(f)
        if len(data) < n:
            return None
        return data

    def warm(self, names: List[str]) -> int:
        for name in names:
            if name in self._warm or name not in self._lru:
                continue
            f = self.handles.grab(self.slots.path(self._lru[name]))  # clean: kept in _warm, close() puts all
            if f is None:
                break
            self._warm[name] = f
        return len(self._warm)

    def close(self) -> None:
        while self._warm:
            _, f = self._warm.popitem()
            self.handles.put(f)

    def merge(self, a: str, b: str, dst: str) -> bool:
        fa = self.handles.grab(a)  # leak: kept open when b cannot be grabbed
        if fa is None:
            return False
        fb = self.handles.grab(b)  # clean: put after the copy
        if fb is None:
            return False
        with open(dst, "wb") as out:
            shutil.copyfileobj(fa, out)
            shutil.copyfileobj(fb, out)
        self.handles.put(fb)
        self.handles.put(fa)
        return True

    def concat(self, parts: List[str], dst: str) -> int:
        written = 0
        f = None
        with open(dst, "wb") as out:
            for p in parts:
                f = self.handles.grab(p)  # leak: rebound on every round, only the last handle is put
                if f is None:
                    break
                shutil.copyfileobj(f, out)
                written += 1
        if f is not None:
            self.handles.put(f)
        return written
