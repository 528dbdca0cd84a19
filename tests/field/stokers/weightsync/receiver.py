from __future__ import annotations

import queue
from typing import Dict, List, Optional, Tuple

import torch

from .arena import Chunk, ChunkArena
from .barrier import UpdateBarrier

Layout = List[Tuple[str, torch.Size, torch.dtype]]


class WeightReceiver:
    def __init__(self, worker: str, arena: ChunkArena, barrier: UpdateBarrier, params: Dict[str, torch.Tensor]) -> None:
        self.worker = worker
        self.arena = arena
        self.barrier = barrier
        self.params = params
        self.inbox: "queue.Queue[Tuple[Chunk, Layout]]" = queue.Queue()
        self.shadow: Dict[str, Chunk] = {}

    def accept(self, payload: torch.Tensor, layout: Layout) -> bool:
        chunk = self.arena.draw()  # clean: near miss, refunded where the payload is too large, otherwise by apply
        if chunk is None:
            return False
        if not chunk.put(payload):
            self.arena.refund(chunk)
            return False
        self.inbox.put((chunk, layout))
        return True

    def apply(self) -> int:
        applied = 0
        while not self.inbox.empty():
            chunk, layout = self.inbox.get_nowait()
            offset = 0
            for name, shape, dtype in layout:
                n = shape.numel() * dtype.itemsize
                self.params[name].copy_(chunk.data[offset : offset + n].view(dtype).view(shape))
                offset += n
                applied += 1
            self.arena.refund(chunk)
        return applied

    def keep_shadow(self, name: str) -> bool:
        chunk = self.arena.draw()  # leak: a shadow of the same name is replaced without a refund
        if chunk is None:
            return False
        if not chunk.put(self.params[name]):
            self.arena.refund(chunk)
            return False
        self.shadow[name] = chunk
        return True

    def rollback(self, name: str) -> bool:
        chunk = self.shadow.pop(name, None)
        if chunk is None:
            return False
        target = self.params[name]
        n = target.numel() * target.element_size()
        target.copy_(chunk.data[:n].view(target.dtype).view(target.shape))
        self.arena.refund(chunk)
        return True

    def generate(self, prompts: List[str], run) -> List[str]:
        if not self.barrier.hold(self.worker):  # leak: an empty prompt ends the generation with the barrier held
            return []
        outs: List[str] = []
        for prompt in prompts:
            if not prompt:
                return outs
            outs.append(run(prompt))
        self.barrier.unhold(self.worker)
        return outs

    def evaluate(self, prompts: List[str], run) -> Optional[float]:
        if not self.barrier.hold(self.worker):  # clean: near miss, an empty list of prompts goes through unhold as well
            return None
        hits = [run(p) for p in prompts]
        self.barrier.unhold(self.worker)
        if not hits:
            return None
        return sum(bool(h) for h in hits) / len(hits)

    def close(self) -> None:
        self.apply()
        for name in list(self.shadow):
            self.arena.refund(self.shadow.pop(name))
