from __future__ import annotations

import os
import zlib
from typing import List, Optional

from .store import ObjectStore


class Spiller:
    def __init__(self, store: ObjectStore, root: str, floor: int = 4) -> None:
        self.store = store
        self.root = root
        self.floor = floor

    def _path(self, oid: str) -> str:
        return os.path.join(self.root, oid)

    def spill(self, oid: str) -> bool:
        view = self.store.pin(oid)  # clean: unpinned by the finally
        if view is None:
            return False
        try:
            with open(self._path(oid), "wb") as out:  # clean: with closes it
                out.write(zlib.crc32(view).to_bytes(4, "little"))
                out.write(view)
        finally:
            self.store.unpin(oid)
        return True

    def spill_cold(self, oids: List[str]) -> int:
        written = 0
        for oid in oids:
            view = self.store.pin(oid)  # leak: an object below the floor is skipped while pinned
            if view is None:
                continue
            if len(view) < self.floor:
                continue
            out = open(self._path(oid), "wb")  # clean: closed in the same round
            out.write(zlib.crc32(view).to_bytes(4, "little"))
            out.write(view)
            out.close()
            self.store.unpin(oid)
            written += 1
        return written

    def restore(self, oid: str) -> Optional[bytes]:
        f = open(self._path(oid), "rb")  # leak: a bad checksum returns with the file open
        crc = int.from_bytes(f.read(4), "little")
        data = f.read()
        if zlib.crc32(data) != crc:
            return None
        f.close()
        self.store.put(oid, data)
        return data

    def restore_lenient(self, oid: str) -> bytes:
        try:
            f = open(self._path(oid), "rb")  # clean: near miss, the handler runs when there is no file
        except FileNotFoundError:
            return b""
        f.seek(4)
        data = f.read()
        f.close()
        return data
