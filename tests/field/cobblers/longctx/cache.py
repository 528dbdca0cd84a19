from __future__ import annotations

from typing import Dict, List, Optional

import numpy as np

from .arena import Chunk, ChunkArena


class TieredKV:
    """KV of a sequence as a list of chunks, with an optional sink chunk that is never evicted."""

    def __init__(self, arena: ChunkArena, use_sink: bool, window: int) -> None:
        self.arena = arena
        self.use_sink = use_sink
        self.window = window
        self.sink: Optional[Chunk] = None
        self.recent: List[Chunk] = []
        self.cold: Dict[int, np.ndarray] = {}

    def begin(self) -> None:
        if self.use_sink and self.sink is None:
            self.sink = self.arena.take()  # clean: near miss, end() gives it back under the same flag

    def append(self, x: np.ndarray) -> bool:
        chunk = self.arena.take()  # clean: near miss, in recent until spilled or end()
        if chunk is None:
            if not self.recent:
                return False
            self.spill()
            chunk = self.arena.take()  # clean: goes into recent
            if chunk is None:
                return False
        chunk.tensor[: len(x)] = x
        self.recent.append(chunk)
        while len(self.recent) > self.window:
            self.spill()
        return True

    def spill(self) -> None:
        victim = self.recent.pop(0)
        self.cold[len(self.cold)] = victim.tensor.copy()
        self.arena.untake(victim)

    def recall(self, idx: int) -> Optional[Chunk]:
        """Cold chunk back in arena memory; the caller unpacks and untakes it."""
        saved = self.cold.get(idx)
        if saved is None:
            return None
        chunk = self.arena.take()  # clean: returned to the caller
        if chunk is not None:
            chunk.tensor[...] = saved
        return chunk

    def end(self) -> None:
        if self.use_sink and self.sink is not None:
            self.arena.untake(self.sink)
            self.sink = None
        self.arena.untake_all(self.recent)
        self.recent.clear()
        self.cold.clear()
