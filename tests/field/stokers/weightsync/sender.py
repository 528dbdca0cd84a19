from __future__ import annotations

import logging
from typing import Dict, Iterable, Iterator, List, Optional, Protocol, Tuple

import torch

from .arena import Chunk, ChunkArena
from .barrier import UpdateBarrier

logger = logging.getLogger(__name__)


class Channel(Protocol):
    def push(self, chunk: Chunk, names: List[str]) -> bool: ...


class WeightSender:
    def __init__(self, arena: ChunkArena, barrier: UpdateBarrier, channel: Channel, timeout: float) -> None:
        self.arena = arena
        self.barrier = barrier
        self.channel = channel
        self.timeout = timeout

    def pack(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> Iterator[Tuple[Chunk, List[str]]]:
        chunk: Optional[Chunk] = None
        names: List[str] = []
        for name, t in weights:
            if chunk is not None and chunk.put(t):
                names.append(name)
                continue
            if chunk is not None:
                yield chunk, names
            chunk = self.arena.draw()  # clean: near miss, the chunk it replaces was yielded and the last one is yielded or refunded
            names = []
            if chunk is None:
                return
            if not chunk.put(t):
                logger.warning("%s does not fit a chunk", name)
                self.arena.refund(chunk)
                chunk = None
                continue
            names.append(name)
        if chunk is not None:
            yield chunk, names

    def update(self, weights: Dict[str, torch.Tensor]) -> int:
        if not self.barrier.begin_update(self.timeout):  # leak: a failed push returns without ending the update
            return 0
        sent = 0
        for chunk, names in self.pack(weights.items()):  # clean: near miss, every chunk is refunded before the push is judged
            ok = self.channel.push(chunk, names)
            self.arena.refund(chunk)
            if not ok:
                logger.warning("push of %d weights failed", len(names))
                return sent
            sent += len(names)
        self.barrier.end_update()
        return sent

    def update_one(self, name: str, t: torch.Tensor, retries: int) -> bool:
        if not self.barrier.begin_update(self.timeout):  # clean: near miss, ended by the finally
            return False
        try:
            for _ in range(retries):
                chunk = self.arena.draw()  # leak: a failed push is retried with a fresh chunk and this one dropped
                if chunk is None or not chunk.put(t):
                    if chunk is not None:
                        self.arena.refund(chunk)
                    return False
                if self.channel.push(chunk, [name]):
                    self.arena.refund(chunk)
                    return True
            return False
        finally:
            self.barrier.end_update()
