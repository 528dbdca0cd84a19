from __future__ import annotations

import logging
import os
import shutil
from typing import Mapping

import torch

from .locks import DirLock
from .staging import StagingArena
from .writer import ShardWriter

logger = logging.getLogger(__name__)


class CheckpointManager:
    def __init__(self, root: str, arena: StagingArena, keep: int = 3) -> None:
        self.root = root
        self.arena = arena
        self.keep = keep
        self.guard = DirLock(root)

    def _steps(self) -> list[int]:
        return sorted(int(d[5:]) for d in os.listdir(self.root) if d.startswith("step-"))

    def save(self, step: int, state: Mapping[str, torch.Tensor]) -> bool:
        if not self.guard.lock():  # leak: the return for a step that is there already keeps the lock
            return False
        folder = os.path.join(self.root, f"step-{step}")
        if os.path.isdir(folder):
            logger.info("step %d is saved already", step)
            return False
        os.makedirs(folder)
        writer = ShardWriter(folder, self.arena)
        futures = [writer.submit(name, t) for name, t in state.items()]
        done = all(f is not None and f.result() >= 0 for f in futures)
        writer.close()
        self.guard.unlock()
        return done

    def prune(self) -> int:
        if not self.guard.lock():  # clean: near miss, finally unlocks also for the early return
            return 0
        try:
            old = self._steps()[: -self.keep]
            if not old:
                return 0
            for step in old:
                shutil.rmtree(os.path.join(self.root, f"step-{step}"), ignore_errors=True)
            return len(old)
        finally:
            self.guard.unlock()

    def rename_latest(self, alias: str) -> bool:
        if not self.guard.lock():  # clean: near miss, unlocked in the handler and at the end
            return False
        try:
            os.rename(os.path.join(self.root, f"step-{self._steps()[-1]}"), os.path.join(self.root, alias))
        except (IndexError, OSError):
            self.guard.unlock()
            return False
        self.guard.unlock()
        return True

    def compare(self, a: torch.Tensor, b: torch.Tensor) -> bool | None:
        left = self.arena.stage_tensor(a)  # leak: the second stage is refused and the first is not dropped
        if left is None:
            return None
        right = self.arena.stage_tensor(b)  # clean: dropped after the comparison, or None
        if right is None:
            return None
        same = left.used == right.used and torch.equal(left.data[: left.used], right.data[: right.used])
        left.drop()
        right.drop()
        return same

    def checked_copy(self, t: torch.Tensor) -> torch.Tensor | None:
        stage = self.arena.grab()  # clean: near miss, dropped on the refusal too
        if stage is None:
            return None
        raw = t.detach().cpu().contiguous().view(-1).view(torch.uint8)
        if raw.numel() > stage.data.numel():
            stage.drop()
            return None
        stage.data[: raw.numel()].copy_(raw)
        out = stage.data[: raw.numel()].clone()
        stage.drop()
        return out.view(t.dtype).view(t.shape)
