"""Calls that jobs make on the daemon."""
import zlib
from typing import Callable, Dict, List, Optional

from .frames import Frame, FrameArena
from .mover import Mover
from .store import PageStore


class Upload:
    def __init__(self, key: str, frame: Frame, total: int):
        self.key = key
        self.frame = frame
        self.total = total
        self.at = 0


class Service:
    def __init__(self, arena: FrameArena, store: PageStore):
        self.arena = arena
        self.store = store
        self.mover = Mover(store)
        self.open_uploads: Dict[int, Upload] = {}
        self._next = 0

    def begin(self, key: str, total: int) -> int:
        f = self.arena.cut(total)  # leak: commit() with a wrong checksum takes the upload out and drops its frame
        if f is None:
            return -1
        self._next += 1
        self.open_uploads[self._next] = Upload(key, f, total)
        return self._next

    def part(self, uid: int, data: bytes) -> bool:
        up = self.open_uploads.get(uid)
        if up is None or up.at + len(data) > up.total:
            return False
        self.arena.view(up.frame)[up.at: up.at + len(data)] = data
        up.at += len(data)
        return True

    def commit(self, uid: int, crc: int) -> bool:
        up = self.open_uploads.pop(uid, None)
        if up is None:
            return False
        data = bytes(self.arena.view(up.frame)[: up.at])
        if zlib.crc32(data) != crc:
            return False
        self.arena.paste(up.frame)
        return self.store.save(up.key, data)

    def abort(self, uid: int) -> None:
        up = self.open_uploads.pop(uid, None)
        if up is not None:
            self.arena.paste(up.frame)

    def read_and_forget(self, key: str) -> Optional[bytes]:
        ent = self.store.detach(key)  # clean: pasted in finally
        if ent is None:
            return None
        f, n = ent
        try:
            return bytes(self.arena.view(f)[:n])
        finally:
            self.arena.paste(f)

    def transform(self, keys: List[str], fn: Callable[[memoryview, memoryview], int]) -> int:
        """Rewrites entries through a work frame."""
        work = self.arena.cut(1 << 20)  # leak: the early return for a refused entry keeps the work frame
        if work is None:
            return 0
        done = 0
        for k in keys:
            ent = self.store.table.get(k)
            if ent is None:
                continue
            n = fn(self.arena.view(ent[0])[: ent[1]], self.arena.view(work))
            if n < 0:
                return done
            self.store.save(k, bytes(self.arena.view(work)[:n]))
            done += 1
        self.arena.paste(work)
        return done
