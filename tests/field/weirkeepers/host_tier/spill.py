"""A file of fixed size records, with a table of record slots."""
from __future__ import annotations

import json
import os
from typing import Dict, List, Optional


class SpillFile:
    def __init__(self, path: str, record: int, slots: int) -> None:
        self.path = path
        self.record = record
        self._slots = list(range(slots))
        self._index: Dict[int, int] = {}
        self._fh = open(path, "w+b")  # clean: closed by close

    def claim_slot(self) -> Optional[int]:
        return self._slots.pop() if self._slots else None

    def yield_slot(self, slot: int) -> None:
        self._slots.append(slot)

    def store(self, digest: int, data: bytes) -> bool:
        if digest in self._index:
            return True
        slot = self.claim_slot()  # clean: in _index, forget yields it
        if slot is None:
            return False
        self._fh.seek(slot * self.record)
        self._fh.write(data)
        self._index[digest] = slot
        return True

    def rewrite(self, digest: int, data: bytes) -> bool:
        slot = self.claim_slot()  # leak: return False for a short record keeps the fresh slot
        if slot is None:
            return False
        self._fh.seek(slot * self.record)
        if self._fh.write(data) < self.record:
            return False
        self.forget(digest)
        self._index[digest] = slot
        return True

    def load(self, digest: int, into: bytearray) -> bool:
        slot = self._index.get(digest)
        if slot is None:
            return False
        self._fh.seek(slot * self.record)
        self._fh.readinto(into)
        return True

    def forget(self, digest: int) -> None:
        slot = self._index.pop(digest, None)
        if slot is not None:
            self.yield_slot(slot)

    def read_index(self) -> Dict[int, int]:
        if not os.path.exists(self.path + ".idx"):
            return {}
        fh = open(self.path + ".idx")  # leak: an empty file returns without close
        text = fh.read()
        if not text.strip():
            return {}
        fh.close()
        return {int(k): v for k, v in json.loads(text).items()}

    def close(self) -> None:
        for digest in list(self._index):
            self.forget(digest)
        self._fh.close()
