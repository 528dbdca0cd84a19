from __future__ import annotations

import hashlib
import os
from typing import Dict, List, Optional

from .files import AtomicFile, SlottedFile, WriterSlots


class CheckpointStore:
    def __init__(self, root: str, slots: WriterSlots) -> None:
        self.root = root
        self.slots = slots
        self.pending: Dict[str, SlottedFile] = {}

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def put(self, name: str, data: bytes, digest: Optional[str] = None) -> bool:
        f = SlottedFile.create(self.slots, self.path(name))  # clean: near miss, discarded on a bad digest, else committed
        if f is None:
            return False
        f.inner.write(data)
        if digest is not None and hashlib.sha1(data).hexdigest() != digest:
            f.discard()
            return False
        f.commit()
        return True

    def put_unless_same(self, name: str, data: bytes) -> bool:
        f = SlottedFile.create(self.slots, self.path(name))  # leak: unchanged content returns with the file and slot open
        if f is None:
            return False
        if os.path.exists(f.inner.path) and os.path.getsize(f.inner.path) == len(data):
            return False
        f.inner.write(data)
        f.commit()
        return True

    def begin(self, name: str) -> bool:
        if name in self.pending:
            return True
        f = SlottedFile.create(self.slots, self.path(name))  # clean: kept in pending until end or rollback
        if f is None:
            return False
        self.pending[name] = f
        return True

    def append(self, name: str, data: bytes) -> None:
        self.pending[name].inner.write(data)

    def end(self, name: str) -> None:
        self.pending.pop(name).commit()

    def rollback(self) -> None:
        for f in self.pending.values():
            f.discard()
        self.pending.clear()

    def write_manifest(self, names: List[str]) -> int:
        f = AtomicFile(self.path("MANIFEST"))  # leak: an empty manifest returns without commit or discard
        lines = [n for n in names if os.path.exists(self.path(n))]
        if not lines:
            return 0
        f.write("\n".join(lines).encode())
        f.commit()
        return len(lines)

    def verify(self, digests: Dict[str, str]) -> List[str]:
        bad: List[str] = []
        for name, want in digests.items():
            try:
                f = open(self.path(name), "rb")  # clean: near miss, the continue belongs to a failed open
            except FileNotFoundError:
                bad.append(name)
                continue
            if hashlib.sha1(f.read()).hexdigest() != want:
                bad.append(name)
            f.close()
        return bad
