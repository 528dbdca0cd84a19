from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Optional

import torch


class AioHandle:
    def __init__(self, threads: int) -> None:
        self.executor = ThreadPoolExecutor(threads)
        self.inflight: list[Future[int]] = []

    def _read(self, path: Path, out: torch.Tensor) -> int:
        fd = os.open(path, os.O_RDONLY)  # clean: near miss, closed in finally also for the short read
        try:
            raw = os.read(fd, out.numel() * out.element_size())
            if len(raw) < out.numel() * out.element_size():
                return -1
            out.copy_(torch.frombuffer(bytearray(raw), dtype=out.dtype))
            return len(raw)
        finally:
            os.close(fd)

    def _write(self, path: Path, src: torch.Tensor) -> int:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY)  # leak: a failed write is answered with -1 and the descriptor stays open
        try:
            n = os.write(fd, src.numpy().tobytes())
        except OSError:
            return -1
        os.close(fd)
        return n

    def submit_read(self, path: Path, out: torch.Tensor) -> None:
        self.inflight.append(self.executor.submit(self._read, path, out))

    def submit_write(self, path: Path, src: torch.Tensor) -> None:
        self.inflight.append(self.executor.submit(self._write, path, src))

    def wait(self) -> Optional[int]:
        results = [f.result() for f in self.inflight]
        self.inflight.clear()
        return sum(results) if results else None
