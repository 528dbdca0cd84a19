"""Chunk pool of the streaming ASR front end; chunks are chained in an intrusive free list."""
from __future__ import annotations

from typing import Callable, Iterator

import numpy as np


class Chunk:
    __slots__ = ("samples", "length", "next", "stamp")

    def __init__(self, capacity: int) -> None:
        self.samples = np.zeros(capacity, np.float32)
        self.length = 0
        self.stamp = 0.0
        self.next: Chunk | None = None

    def fill(self, pcm: np.ndarray) -> int:
        n = min(len(pcm), len(self.samples))
        self.samples[:n] = pcm[:n]
        self.length = n
        return n


class ChunkPool:
    def __init__(self, count: int, capacity: int) -> None:
        self.capacity = capacity
        self._head: Chunk | None = None
        for _ in range(count):
            chunk = Chunk(capacity)
            chunk.next = self._head
            self._head = chunk

    def take(self) -> Chunk | None:
        chunk = self._head
        if chunk is None:
            return None
        self._head = chunk.next  # clean: unlinked chunk is returned
        chunk.next = None
        chunk.length = 0
        return chunk

    def recycle(self, chunk: Chunk) -> None:
        chunk.next = self._head
        self._head = chunk

    def recycle_chain(self, chunk: Chunk | None) -> None:
        while chunk is not None:
            following = chunk.next
            self.recycle(chunk)
            chunk = following


class Utterance:
    """Chain of chunks between two silences."""

    def __init__(self, pool: ChunkPool) -> None:
        self.pool = pool
        self.first: Chunk | None = None
        self.last: Chunk | None = None

    def push(self, pcm: np.ndarray) -> bool:
        while len(pcm):
            chunk = self.pool.take()  # clean: linked into the chain, clear() recycles it
            if chunk is None:
                return False
            pcm = pcm[chunk.fill(pcm):]
            if self.last is None:
                self.first = chunk
            else:
                self.last.next = chunk
            self.last = chunk
        return True

    def push_stamped(self, pcm: np.ndarray, stamp: float) -> bool:
        chunk = self.pool.take()  # leak: out of order audio is refused without recycling the chunk
        if chunk is None:
            return False
        chunk.fill(pcm)
        chunk.stamp = stamp
        if self.last is not None and stamp <= self.last.stamp:
            return False
        if self.last is None:
            self.first = chunk
        else:
            self.last.next = chunk
        self.last = chunk
        return True

    def __iter__(self) -> Iterator[Chunk]:
        chunk = self.first
        while chunk is not None:
            yield chunk
            chunk = chunk.next

    def restart(self, pcm: np.ndarray) -> None:
        """Begin a new chain with the first chunk of pcm."""
        self.first = self.last = self.pool.take()  # leak: the chain held so far is overwritten
        if self.first is not None:
            self.first.fill(pcm)

    def clear(self) -> None:
        self.pool.recycle_chain(self.first)
        self.first = self.last = None


class FrontEnd:
    def __init__(self, pool: ChunkPool, vad: Callable[[np.ndarray], float]) -> None:
        self.pool = pool
        self.vad = vad
        self.current = Utterance(pool)
        self.preroll: list[Chunk] = []
        self.noise: Chunk | None = None
        self.max_preroll = 4

    def energy(self, pcm: np.ndarray) -> float:
        chunk = self.pool.take()  # clean: recycled before the return
        if chunk is None:
            return 0.0
        n = chunk.fill(pcm)
        value = float(np.square(chunk.samples[:n]).mean())
        self.pool.recycle(chunk)
        return value

    def gate(self, pcm: np.ndarray, threshold: float) -> bool:
        chunk = self.pool.take()  # clean: near miss, speech goes to the preroll, the rest is recycled
        if chunk is None:
            return False
        n = chunk.fill(pcm)
        if self.vad(chunk.samples[:n]) < threshold:
            self.pool.recycle(chunk)
            return False
        self.preroll.append(chunk)
        if len(self.preroll) > self.max_preroll:
            self.pool.recycle(self.preroll.pop(0))
        return True

    def resampled(self, pcm: np.ndarray, factor: int) -> Chunk | None:
        chunk = self.pool.take()  # clean: returned to the caller
        if chunk is not None:
            chunk.fill(pcm[::factor])
        return chunk

    def push_resampled(self, pcm: np.ndarray, factor: int) -> bool:
        chunk = self.resampled(pcm, factor)  # leak: its samples are copied into the utterance and the chunk is dropped
        if chunk is None:
            return False
        return self.current.push(chunk.samples[: chunk.length].copy())

    def vad_resampled(self, pcm: np.ndarray, factor: int) -> float:
        chunk = self.resampled(pcm, factor)  # clean: near miss, the value is computed before recycling
        if chunk is None:
            return 0.0
        try:
            return self.vad(chunk.samples[: chunk.length])
        finally:
            self.pool.recycle(chunk)

    def loudest(self, blocks: list[np.ndarray]) -> np.ndarray | None:
        best: Chunk | None = None
        for pcm in blocks:
            chunk = self.pool.take()  # leak: a louder chunk replaces best, whose chunk is lost
            if chunk is None:
                break
            chunk.fill(pcm)
            if best is None or np.abs(chunk.samples).max() > np.abs(best.samples).max():
                best = chunk
            else:
                self.pool.recycle(chunk)
        if best is None:
            return None
        out = best.samples[: best.length].copy()
        self.pool.recycle(best)
        return out

    def learn_noise(self, pcm: np.ndarray) -> None:
        self.noise = self.pool.take()  # leak: overwrites the noise chunk learnt before
        if self.noise is not None:
            self.noise.fill(pcm)

    def flush(self) -> None:
        if self.noise is not None:
            self.pool.recycle(self.noise)
            self.noise = None
        while self.preroll:
            self.pool.recycle(self.preroll.pop())
        self.current.clear()
