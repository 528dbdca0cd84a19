"""A bounded table of open descriptors (the parallel file system limits them for each node)."""
from __future__ import annotations

import os


class DescriptorSlots:
    def __init__(self, limit: int):
        self.limit = limit
        self._fds: dict[int, str] = {}

    def open_slot(self, path: str, flags: int = os.O_WRONLY | os.O_CREAT) -> int | None:
        if len(self._fds) >= self.limit:
            return None
        fd = os.open(path, flags, 0o644)
        self._fds[fd] = path
        return fd

    def close_slot(self, fd: int) -> None:
        del self._fds[fd]
        os.close(fd)

    def size_of(self, path: str) -> int:
        fd = self.open_slot(path, os.O_RDONLY)  # clean: closed after fstat; None means no slot
        if fd is None:
            return os.stat(path).st_size
        size = os.fstat(fd).st_size
        self.close_slot(fd)
        return size
