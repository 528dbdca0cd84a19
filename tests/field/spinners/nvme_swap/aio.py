"""File descriptors of swap files; a small table keeps recently used ones open."""
from __future__ import annotations

import os
from collections import OrderedDict
from typing import List, Tuple


class FdTable:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._fds: "OrderedDict[str, int]" = OrderedDict()

    def fd(self, path: str) -> int:
        if path in self._fds:
            self._fds.move_to_end(path)
            return self._fds[path]
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # clean: near miss, the table closes the oldest ones and close_all the rest
        self._fds[path] = fd
        while len(self._fds) > self.limit:
            _, old = self._fds.popitem(last=False)
            os.close(old)
        return fd

    def forget(self, path: str) -> None:
        fd = self._fds.pop(path, None)
        if fd is not None:
            os.close(fd)

    def close_all(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def copy_blocks(src: str, dst: str, sizes: List[int]) -> int:
    rfd = os.open(src, os.O_RDONLY)  # leak: the handler of the second open returns without closing it
    try:
        wfd = os.open(dst, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # clean: closed at the end
    except PermissionError:
        return -1
    copied = 0
    for size in sizes:
        copied += os.write(wfd, os.read(rfd, size))
    os.close(wfd)
    os.close(rfd)
    return copied


def open_pair(src: str, dst: str) -> Tuple[int, int]:
    rfd = os.open(src, os.O_RDONLY)  # clean: near miss, closed in the handler before it raises again, returned otherwise
    try:
        wfd = os.open(dst, os.O_WRONLY | os.O_CREAT, 0o600)  # clean: returned to the caller
    except OSError:
        os.close(rfd)
        raise
    return rfd, wfd


def append_file(src: str, dst: str) -> int:
    rfd, wfd = open_pair(src, dst)  # clean: both are closed
    try:
        os.lseek(wfd, 0, os.SEEK_END)
        return os.write(wfd, os.read(rfd, 1 << 20))
    finally:
        os.close(wfd)
        os.close(rfd)
