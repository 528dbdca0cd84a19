from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Iterable, Mapping

import torch

from .staging import Stage, StagingArena

logger = logging.getLogger(__name__)


class ShardWriter:
    def __init__(self, folder: str, arena: StagingArena, threads: int = 2) -> None:
        self.folder = folder
        self.arena = arena
        self.executor = ThreadPoolExecutor(threads)
        self.queued: list[Stage] = []
        self.header: Stage | None = None

    def _write(self, name: str, stage: Stage) -> int:
        try:
            with open(os.path.join(self.folder, name), "wb") as f:
                return f.write(stage.data[: stage.used].numpy().tobytes())
        finally:
            stage.drop()

    def submit(self, name: str, t: torch.Tensor) -> Future[int] | None:
        stage = self.arena.stage_tensor(t)  # clean: near miss, the write in the executor drops it
        if stage is None:
            return None
        return self.executor.submit(self._write, name, stage)

    def write_now(self, name: str, t: torch.Tensor) -> int:
        stage = self.arena.stage_tensor(t)  # leak: an existing file returns before the write which drops it
        if stage is None:
            return -1
        if os.path.exists(os.path.join(self.folder, name)):
            return 0
        return self._write(name, stage)

    def enqueue(self, tensors: Iterable[torch.Tensor]) -> int:
        n = 0
        for t in tensors:
            stage = self.arena.stage_tensor(t)  # clean: near miss, flush takes each from queued, its write drops it
            if stage is None:
                break
            self.queued.append(stage)
            n += 1
        return n

    def flush(self) -> int:
        total = 0
        for i, stage in enumerate(self.queued):
            try:
                total += self._write(f"part-{i}", stage)
            except OSError as e:
                logger.error("part %d: %s", i, e)
        self.queued.clear()
        return total

    def digest(self, state: Mapping[str, torch.Tensor]) -> dict[str, int]:
        out: dict[str, int] = {}
        for name, t in state.items():
            stage = self.arena.stage_tensor(t)  # clean: near miss, dropped before the `continue` for an empty one
            if stage is None:
                continue
            total = int(stage.data[: stage.used].sum()) if stage.used else 0
            stage.drop()
            if not total:
                continue
            out[name] = total
        return out

    def set_header(self, t: torch.Tensor) -> bool:
        stage = self.arena.stage_tensor(t)  # leak: the header that was set before is overwritten and not dropped
        if stage is None:
            return False
        self.header = stage
        return True

    def close(self) -> None:
        self.flush()
        if self.header is not None:
            self._write("header", self.header)
            self.header = None
        self.executor.shutdown()
