from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Optional


class LeaseFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.held = False

    def acquire(self) -> bool:
        try:
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # clean: closed at once, the file itself is the lease
        except FileExistsError:
            return False
        os.close(fd)
        self.held = True
        return True

    def release(self) -> None:
        self.held = False
        self.path.unlink()

    def __enter__(self) -> bool:
        return self.acquire()  # clean: near miss, __exit__ releases whenever it is held

    def __exit__(self, *exc: object) -> None:
        if self.held:
            self.release()


class ScratchRoot:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.dirs: set[Path] = set()

    def create(self, prefix: str) -> Path:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=self.root))
        self.dirs.add(path)
        return path

    def discard(self, path: Path) -> None:
        self.dirs.discard(path)
        shutil.rmtree(path, ignore_errors=True)


class LogSink:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.fds: set[int] = set()

    def attach(self, name: str) -> int:
        fd = os.open(self.root / f"{name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.fds.add(fd)
        return fd

    def detach(self, fd: int) -> None:
        self.fds.discard(fd)
        os.close(fd)


class RankSlots:
    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def grab(self) -> Optional[int]:
        return self._free.pop(0) if self._free else None

    def drop(self, rank: int) -> None:
        self._free.append(rank)
