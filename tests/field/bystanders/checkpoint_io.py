"""Asynchronous checkpointing through host staging areas."""
from __future__ import annotations

import io
import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Dict, List, Optional

import torch

logger = logging.getLogger("ckpt")


class StagingAreas:
    def __init__(self, n: int, size: int) -> None:
        self._areas: List[torch.Tensor] = [torch.empty(size, dtype=torch.uint8) for _ in range(n)]
        self._lock = threading.Lock()

    def take_area(self) -> torch.Tensor:
        with self._lock:
            if not self._areas:
                raise RuntimeError("no staging area")
            return self._areas.pop()

    def return_area(self, area: torch.Tensor) -> None:
        with self._lock:
            self._areas.append(area)


class AsyncCheckpointer:
    def __init__(self, directory: str, areas: StagingAreas, workers: int = 2) -> None:
        self.directory = directory
        self.areas = areas
        self.exec = ThreadPoolExecutor(workers)
        self.pending: List[Future] = []
        self._busy = threading.Lock()

    def _path(self, step: int, name: str) -> str:
        return os.path.join(self.directory, f"step{step:07d}", name)

    def _write(self, path: str, area: torch.Tensor, n: int) -> None:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as f:  # clean: with block
                f.write(area[:n].numpy().tobytes())
        finally:
            self.areas.return_area(area)

    def _stage(self, t: torch.Tensor, area: torch.Tensor) -> int:
        raw = t.detach().cpu().contiguous().view(torch.uint8).flatten()
        area[: raw.numel()].copy_(raw)
        return raw.numel()

    def save(self, step: int, state: Dict[str, torch.Tensor]) -> None:
        for name, t in state.items():
            area = self.areas.take_area()  # clean: near miss, _write in the worker returns it
            n = self._stage(t, area)
            self.pending.append(self.exec.submit(self._write, self._path(step, name), area, n))

    def save_one(self, step: int, name: str, t: torch.Tensor, overwrite: bool = False) -> Optional[Future]:
        area = self.areas.take_area()  # leak: an existing file makes it return without the area
        path = self._path(step, name)
        if os.path.exists(path) and not overwrite:
            logger.info("%s exists", path)
            return None
        n = self._stage(t, area)
        fut = self.exec.submit(self._write, path, area, n)
        self.pending.append(fut)
        return fut

    def save_with_callback(self, step: int, name: str, t: torch.Tensor, sink: Any) -> None:
        area = self.areas.take_area()  # clean: near miss, the done callback returns it
        n = self._stage(t, area)
        fut = self.exec.submit(sink.put, self._path(step, name), area[:n])
        fut.add_done_callback(lambda _f, a=area: self.areas.return_area(a))
        self.pending.append(fut)

    def checksum(self, state: Dict[str, torch.Tensor]) -> Dict[str, int]:
        sums = {}
        area = self.areas.take_area()  # clean: one area for all tensors, returned at the end
        for name, t in state.items():
            if t.numel() == 0:
                continue
            n = self._stage(t, area)
            sums[name] = int(area[:n].long().sum())
        self.areas.return_area(area)
        return sums

    def pickle_size(self, obj: Any) -> int:
        area = self.areas.take_area()  # leak: nothing returns the area after the measurement
        f = io.BytesIO()
        torch.save(obj, f)
        view = area[: f.tell()]
        view.copy_(torch.frombuffer(bytearray(f.getvalue()), dtype=torch.uint8))
        return view.numel()

    def load(self, step: int, names: List[str]) -> Dict[str, bytes]:
        out = {}
        for name in names:
            try:
                f = open(self._path(step, name), "rb")  # leak: the empty file is skipped while open
            except FileNotFoundError:
                continue
            data = f.read()
            if not data:
                continue
            out[name] = data
            f.close()
        return out

    def try_exclusive(self, step: int, state: Dict[str, torch.Tensor]) -> bool:
        if not self._busy.acquire(blocking=False):  # clean: near miss, released in the finally when it was obtained
            return False
        try:
            self.save(step, state)
            return True
        finally:
            self._busy.release()

    def prune(self, keep: int) -> int:
        self._busy.acquire()  # leak: few checkpoints return before the release
        steps = sorted(os.listdir(self.directory))
        if len(steps) <= keep:
            return 0
        for s in steps[:-keep]:
            os.rename(os.path.join(self.directory, s), os.path.join(self.directory, f".old-{s}"))
        self._busy.release()
        return len(steps) - keep

    def wait(self, timeout: float = 600.0) -> None:
        end = time.monotonic() + timeout
        for fut in self.pending:
            fut.result(timeout=max(0.0, end - time.monotonic()))
        self.pending.clear()
