from __future__ import annotations

import io
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from typing import IO, Any

import torch


@dataclass
class CkptMeta:
    step: int
    world_size: int = 1
    sharded: bool = False


class StagingArea:
    """Host buffers for asynchronous checkpoints, handed out by size class."""

    def __init__(self, sizes: list[int]) -> None:
        self.shelves: dict[int, list[io.BytesIO]] = {s: [] for s in sorted(sizes)}

    def borrow(self, nbytes: int) -> io.BytesIO:
        for size, shelf in self.shelves.items():
            if size >= nbytes and shelf:
                return shelf.pop()  # clean: goes to the caller
        return io.BytesIO()

    def hand_back(self, b: io.BytesIO) -> None:
        size = b.seek(0, io.SEEK_END)
        for cls in self.shelves:
            if cls >= size:
                b.seek(0)
                b.truncate()
                self.shelves[cls].append(b)
                return
        b.close()


def write_meta(path: str, meta: CkptMeta) -> None:
    with open(path, "w") as f:  # clean: with statement
        json.dump(asdict(meta), f)


def read_meta(path: str) -> CkptMeta | None:
    f = open(path)  # leak: an empty file returns before close
    text = f.read()
    if not text:
        return None
    meta = CkptMeta(**json.loads(text))
    f.close()
    return meta


def read_meta_checked(path: str) -> CkptMeta:
    f = open(path)  # clean: near miss, closed before the raise
    text = f.read()
    f.close()
    if not text:
        raise ValueError(path)
    return CkptMeta(**json.loads(text))


class CheckpointWriter:
    def __init__(self, root: str, staging: StagingArea, max_bytes: int = 1 << 30) -> None:
        self.root = root
        self.staging = staging
        self.max_bytes = max_bytes
        self._log: IO[str] | None = None
        self._events: IO[str] | None = None
        self._queue: list[tuple[str, io.BytesIO]] = []

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def save(self, name: str, state: dict[str, Any]) -> int:
        buf = self.staging.borrow(4096)  # clean: handed back on both ways
        torch.save(state, buf)
        n = buf.tell()
        if n > self.max_bytes:
            self.staging.hand_back(buf)
            raise ValueError("checkpoint too large")
        with open(self._path(name), "wb") as f:  # clean: with statement
            f.write(buf.getvalue())
        self.staging.hand_back(buf)
        return n

    def save_small(self, name: str, state: dict[str, Any]) -> int:
        buf = self.staging.borrow(512)  # leak: the raise for a large state skips hand_back
        torch.save(state, buf)
        if buf.tell() > 512:
            raise ValueError(f"{name}: use save()")
        out = open(self._path(name), "wb")  # clean: closed below
        n = out.write(buf.getvalue())
        out.close()
        self.staging.hand_back(buf)
        return n

    def enqueue(self, name: str, state: dict[str, Any]) -> None:
        buf = self.staging.borrow(1 << 20)  # clean: queued, flush hands every one back
        torch.save(state, buf)
        self._queue.append((name, buf))

    def flush(self) -> None:
        while self._queue:
            name, buf = self._queue.pop(0)
            with open(self._path(name), "wb") as f:  # clean: with statement
                f.write(buf.getvalue())
            self.staging.hand_back(buf)

    def open_log(self) -> None:
        if self._log is None:
            self._log = open(self._path("log.txt"), "a")  # clean: close() closes the field

    def rotate_events(self, n: int) -> None:
        self._events = open(self._path(f"events.{n}.txt"), "a")  # leak: the next rotation overwrites the open file, only the last is closed

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._events is not None:
            self._events.close()
            self._events = None
        self.flush()

    def fingerprint(self, state: dict[str, Any]) -> int:
        buf = self.staging.borrow(1 << 16)  # leak: buf is rebound to the bytes, the buffer is not handed back
        torch.save(state, buf)
        buf = buf.getvalue()
        return hash(buf)

    def write_atomic(self, name: str, payload: bytes) -> bool:
        tmp = tempfile.mktemp(dir=self.root)
        f = open(tmp, "wb")  # leak: the handler returns without closing
        try:
            f.write(payload)
            f.flush()
        except OSError:
            os.unlink(tmp)
            return False
        f.close()
        os.replace(tmp, self._path(name))
        return True

    def append_all(self, names: list[str], dest: str) -> int:
        total = 0
        out = open(self._path(dest), "wb")  # clean: closed after the loop, the loop has no exit
        for n in names:
            src = open(self._path(n), "rb")  # clean: near miss, closed before the continue
            data = src.read()
            src.close()
            if not data:
                continue
            total += out.write(data)
        out.close()
        return total
