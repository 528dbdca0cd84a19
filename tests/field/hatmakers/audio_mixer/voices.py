"""Voices produce blocks; a bank keeps those that sound at the moment."""
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Optional, Sequence

from .blocks import Block, BlockRing


class Voice(ABC):
    def __init__(self, ring: BlockRing) -> None:
        self.ring = ring
        self.muted = False

    @abstractmethod
    def produce(self) -> Optional[Block]:
        """Next block, with one reference for the caller."""

    def stop(self) -> None:
        self.muted = True


class Sine(Voice):
    def __init__(self, ring: BlockRing, frequency: float) -> None:
        super().__init__(ring)
        self.step = frequency / 48000
        self.phase = 0.0

    def produce(self) -> Optional[Block]:
        if self.muted:
            return None
        block = self.ring.fetch()  # clean: handed to the caller
        if block is None:
            return None
        for i in range(self.ring.length):
            block.samples[i] = math.sin(2 * math.pi * self.phase)
            self.phase += self.step
        return block


class Sample(Voice):
    def __init__(self, ring: BlockRing, data: Sequence[float]) -> None:
        super().__init__(ring)
        self.data = data
        self.position = 0

    def produce(self) -> Optional[Block]:
        block = self.ring.fetch()  # leak: at the end of the data None is returned and the block is lost
        if block is None:
            return None
        part = self.data[self.position : self.position + self.ring.length]
        if not part:
            self.muted = True
            return None
        block.samples[: len(part)] = type(block.samples)("f", part)
        self.position += len(part)
        return block


class Loop(Voice):
    """Repeats one block; keeps a reference of its own."""

    def __init__(self, ring: BlockRing) -> None:
        super().__init__(ring)
        self._body: Optional[Block] = None

    def record(self, data: Sequence[float]) -> bool:
        block = self.ring.fetch()  # clean: near miss, the old body is dropped, stop() drops this one
        if block is None:
            return False
        for i, value in enumerate(data[: self.ring.length]):
            block.samples[i] = value
        if self._body is not None:
            self._body.drop()
        self._body = block
        return True

    def produce(self) -> Optional[Block]:
        if self.muted or self._body is None:
            return None
        return self._body.retain()  # clean: the reference is handed to the caller

    def stop(self) -> None:
        super().stop()
        if self._body is not None:
            self._body.drop()
            self._body = None


class Echo(Voice):
    def __init__(self, ring: BlockRing, source: Voice, decay: float) -> None:
        super().__init__(ring)
        self.source = source
        self.decay = decay
        self._last: Optional[Block] = None

    def produce(self) -> Optional[Block]:
        current = self.source.produce()  # clean: handed to the caller
        if current is None:
            return None
        if self._last is not None:
            self._last.gain(self.decay)
            current.add(self._last)
        self._last = current.retain()  # leak: the block kept before is overwritten and keeps its reference
        return current

    def stop(self) -> None:
        super().stop()
        if self._last is not None:
            self._last.drop()
            self._last = None


class VoiceBank:
    def __init__(self) -> None:
        self.voices: list[Voice] = []

    def add(self, voice: Voice) -> None:
        self.voices.append(voice)

    def collect(self) -> list[Block]:
        """Blocks of all voices; every one is the caller's."""
        blocks: list[Block] = []
        for voice in self.voices:
            block = voice.produce()  # clean: near miss, handed on in the list
            if block is not None:
                blocks.append(block)
        return blocks

    def loudest(self) -> float:
        best = 0.0
        for voice in self.voices:
            block = voice.produce()  # clean: dropped after the peak
            if block is None:
                continue
            best = max(best, block.peak())
            block.drop()
        return best
