"""Spilled pages as files in a directory."""
from __future__ import annotations

import os
import tempfile
from typing import Optional


class SpillDir:
    def __init__(self, root: str):
        self.root = root

    def path(self, key: str) -> str:
        return os.path.join(self.root, key)

    def store(self, key: str, data: bytes) -> bool:
        fd, tmp = tempfile.mkstemp(dir=self.root)  # clean: near miss, fdopen takes the descriptor over and with closes it
        with os.fdopen(fd, "wb") as fh:
            fh.write(data)
        os.replace(tmp, self.path(key))
        return True

    def append(self, key: str, data: bytes) -> bool:
        fd = os.open(self.path(key), os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # leak: a short write returns before close
        written = os.write(fd, data)
        if written < len(data):
            return False
        os.close(fd)
        return True

    def load(self, key: str, limit: int) -> Optional[bytes]:
        try:
            fh = open(self.path(key), "rb")  # clean: near miss, the handler runs without a file and both returns close
        except FileNotFoundError:
            return None
        data = fh.read(limit + 1)
        if len(data) > limit:
            fh.close()
            return None
        fh.close()
        return data

    def line_count(self, key: str) -> int:
        return sum(1 for _ in open(self.path(key), "rb"))  # leak: the file object is never closed
