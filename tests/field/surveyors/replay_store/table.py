from __future__ import annotations

import random
from collections import deque
from typing import Optional

import numpy as np

from .chunks import Chunk, ChunkPool


class ReplayTable:
    def __init__(self, pool: ChunkPool, max_items: int) -> None:
        self.pool = pool
        self.max_items = max_items
        self.items: deque[Chunk] = deque()
        self.writers: dict[str, Chunk] = {}
        self.priority: dict[int, float] = {}

    def append(self, actor: str, row: np.ndarray) -> bool:
        chunk = self.writers.get(actor)
        if chunk is None:
            chunk = self.pool.take_chunk()  # clean: near miss, kept in writers until seal moves it to items or close_writer drops it
            if chunk is None:
                return False
            self.writers[actor] = chunk
        chunk.append(row)
        if chunk.full:
            self.seal(actor)
        return True

    def seal(self, actor: str) -> None:
        chunk = self.writers.pop(actor)
        self.items.append(chunk)
        while len(self.items) > self.max_items:
            self.pool.drop_chunk(self.items.popleft())

    def restart_writer(self, actor: str) -> bool:
        chunk = self.pool.take_chunk()  # leak: the half-filled chunk the actor was writing is overwritten in writers
        if chunk is None:
            return False
        self.writers[actor] = chunk
        return True

    def insert_trajectory(self, rows: np.ndarray, weight: float) -> bool:
        chunk = self.pool.take_chunk()  # leak: a trajectory with no positive weight returns without drop_chunk
        if chunk is None:
            return False
        for row in rows[: len(chunk.data)]:
            chunk.append(row)
        if weight <= 0.0:
            return False
        self.priority[chunk.key] = weight
        self.items.append(chunk)
        return True

    def sample(self, count: int) -> list[Chunk]:
        if len(self.items) < count:
            return []
        picked = random.sample(list(self.items), count)
        return [self.pool.retain_chunk(chunk) for chunk in picked]  # clean: handed to the caller, who drops each

    def latest(self) -> Optional[Chunk]:
        if not self.items:
            return None
        return self.pool.retain_chunk(self.items[-1])  # clean: near miss, handed to the caller, the table keeps its own reference

    def close_writer(self, actor: str) -> None:
        chunk = self.writers.pop(actor, None)
        if chunk is None:
            return
        if chunk.length:
            self.items.append(chunk)
            return
        self.pool.drop_chunk(chunk)

    def clear(self) -> None:
        while self.items:
            self.pool.drop_chunk(self.items.popleft())
        for actor in list(self.writers):
            self.pool.drop_chunk(self.writers.pop(actor))
