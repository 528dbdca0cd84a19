"""Shard files and the manifest."""
from __future__ import annotations

import json
import os
from typing import Any, BinaryIO, Optional

from .staging import Slab


class ShardFile:
    def __init__(self, path: str) -> None:
        self.path = path
        self._fh: Optional[BinaryIO] = None
        self.written = 0

    def open(self) -> "ShardFile":
        self._fh = open(self.path + ".tmp", "wb")  # clean: closed by commit() or discard()
        return self

    def write(self, slab: Slab) -> None:
        assert self._fh is not None
        self.written += self._fh.write(slab.view[: slab.filled])

    def commit(self) -> None:
        assert self._fh is not None
        self._fh.flush()
        os.fsync(self._fh.fileno())
        self._fh.close()
        self._fh = None
        os.replace(self.path + ".tmp", self.path)

    def discard(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None
            os.unlink(self.path + ".tmp")


class Manifest:
    def __init__(self, root: str) -> None:
        self.root = root
        self.entries: dict[str, Any] = {}

    def load(self) -> bool:
        try:
            fh = open(os.path.join(self.root, "manifest.json"))  # leak: a decode error is survived with it open
            self.entries = json.load(fh)
            fh.close()
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        return True

    def save(self) -> None:
        path = os.path.join(self.root, "manifest.json")
        fh = open(path, "w")  # clean: closed in the finally
        try:
            json.dump(self.entries, fh)
        finally:
            fh.close()

    def append_journal(self, line: str) -> None:
        fd = os.open(os.path.join(self.root, "journal"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # clean: closed in the finally
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)

    def sync_dir(self) -> bool:
        fd = os.open(self.root, os.O_RDONLY)  # leak: a file system without directory fsync returns False first
        try:
            os.fsync(fd)
        except OSError:
            return False
        os.close(fd)
        return True
