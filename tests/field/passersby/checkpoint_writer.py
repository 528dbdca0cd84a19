"""Sharded, asynchronous checkpoint writer."""
import io
import json
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import torch

logger = logging.getLogger("ckpt")


@dataclass(frozen=True)
class WriterOptions:
    directory: Path
    shards: int = 4
    fsync: bool = True
    keep_last: int = 3
    compress: bool = False


class HostBufferStack:
    def __init__(self, n: int, size: int):
        self._stack: List[bytearray] = [bytearray(size) for _ in range(n)]
        self._cv = threading.Condition()

    def obtain(self) -> bytearray:
        with self._cv:  # clean: with statement
            while not self._stack:
                self._cv.wait()
            return self._stack.pop()  # clean: handed to the caller

    def recycle(self, b: bytearray) -> None:
        with self._cv:  # clean: with statement
            self._stack.append(b)
            self._cv.notify()


class CheckpointWriter:
    def __init__(self, opts: WriterOptions, buffers: HostBufferStack):
        self.opts = opts
        self.buffers = buffers
        self.executor = ThreadPoolExecutor(max_workers=opts.shards)
        self._pending: Dict[int, Future] = {}
        self._index_fh: Optional[io.TextIOBase] = None

    def _shard_path(self, step: int, i: int) -> Path:
        return self.opts.directory / f"step{step:08d}-{i:02d}.pt"

    def _serialize(self, state: Mapping[str, torch.Tensor], buf: bytearray) -> int:
        bio = io.BytesIO()
        torch.save(dict(state), bio)
        data = bio.getvalue()
        if len(data) > len(buf):
            raise BufferError(f"shard of {len(data)} bytes does not fit into {len(buf)}")
        buf[: len(data)] = data
        return len(data)

    def _write(self, path: Path, buf: bytearray, n: int) -> None:
        try:
            with open(path, "wb") as fh:  # clean: with statement
                fh.write(memoryview(buf)[:n])
                if self.opts.fsync:
                    fh.flush()
                    os.fsync(fh.fileno())
        finally:
            self.buffers.recycle(buf)

    def save_shard(self, step: int, i: int, state: Mapping[str, torch.Tensor]) -> None:
        buf = self.buffers.obtain()  # clean: near miss, handler recycles, otherwise _write does on the worker
        try:
            n = self._serialize(state, buf)
        except BufferError:
            self.buffers.recycle(buf)
            raise
        self._pending[i] = self.executor.submit(self._write, self._shard_path(step, i), buf, n)

    def save_small(self, step: int, name: str, state: Mapping[str, torch.Tensor]) -> bool:
        buf = self.buffers.obtain()  # leak: the BufferError handler returns False with the buffer out
        try:
            n = self._serialize(state, buf)
        except BufferError as e:
            logger.error("cannot save %s: %s", name, e)
            return False
        self._write(self.opts.directory / f"{name}-{step}.pt", buf, n)
        return True

    def estimate(self, state: Mapping[str, torch.Tensor]) -> int:
        scratch = self.buffers.obtain()  # clean: recycled in finally
        try:
            return self._serialize(state, scratch)
        finally:
            self.buffers.recycle(scratch)

    def write_manifest(self, step: int, meta: Dict[str, Any]) -> bool:
        fh = open(self.opts.directory / f"manifest-{step}.json", "w")  # leak: no shards, returned without closing
        if not self._pending:
            logger.warning("manifest without shards at step %d", step)
            return False
        json.dump({"step": step, "shards": sorted(self._pending), **meta}, fh)
        fh.close()
        return True

    def open_index(self) -> None:
        if self._index_fh is None:
            self._index_fh = open(self.opts.directory / "index.jsonl", "a")  # clean: near miss, only when none is open; close() closes it

    def log_step(self, step: int) -> None:
        self.open_index()
        assert self._index_fh is not None
        self._index_fh.write(json.dumps({"step": step}) + "\n")

    def copy_latest(self, src: Path, dst: Path) -> int:
        buf = self.buffers.obtain()  # leak: a missing source returns 0 with the buffer out
        if not src.exists():
            return 0
        copied = 0
        with open(src, "rb") as a, open(dst, "wb") as b:  # clean: with statement
            while n := a.readinto(buf):
                b.write(memoryview(buf)[:n])
                copied += n
        self.buffers.recycle(buf)
        return copied

    def verify(self, step: int) -> List[int]:
        """Indices of shards which differ in size from the manifest."""
        bad = []
        for i in range(self.opts.shards):
            buf = self.buffers.obtain()  # clean: near miss, the continue passes through finally
            try:
                path = self._shard_path(step, i)
                if not path.exists():
                    bad.append(i)
                    continue
                with open(path, "rb") as fh:  # clean: with statement
                    n = fh.readinto(buf)
                if n != path.stat().st_size:
                    bad.append(i)
            finally:
                self.buffers.recycle(buf)
        return bad

    def wait(self) -> None:
        for fut in self._pending.values():
            fut.result()
        self._pending.clear()

    def close(self) -> None:
        self.wait()
        self.executor.shutdown()
        if self._index_fh is not None:
            self._index_fh.close()
            self._index_fh = None
