"""Sums the voices into output blocks and passes them to the device queue."""
from __future__ import annotations

import logging
import queue
from typing import Optional

from .blocks import Block, BlockRing
from .voices import VoiceBank

log = logging.getLogger("audio.mixer")


class Mixer:
    def __init__(self, ring: BlockRing, bank: VoiceBank, depth: int = 4) -> None:
        self.ring = ring
        self.bank = bank
        self.depth = depth
        self.output: "queue.Queue[Block]" = queue.Queue()
        self.meters: list[float] = []
        self.monitor: "queue.Queue[Block]" = queue.Queue()

    def mix(self) -> Optional[Block]:
        total = self.ring.fetch()  # clean: handed to the caller
        if total is None:
            return None
        for part in self.bank.collect():  # clean: each block is dropped in the loop
            total.add(part)
            part.drop()
        return total

    def mix_solo(self, index: int) -> Optional[Block]:
        parts = self.bank.collect()  # leak: only the chosen one goes to the caller, the others are never dropped
        if index >= len(parts):
            for part in parts:
                part.drop()
            return None
        return parts[index]

    def mix_duo(self) -> Optional[Block]:
        parts = self.bank.collect()  # clean: near miss, the first is handed on, the rest is dropped
        if not parts:
            return None
        first, rest = parts[0], parts[1:]
        for part in rest:
            first.add(part)
            part.drop()
        return first

    def render(self) -> bool:
        block = self.mix()  # clean: near miss, put into the device queue that play() empties
        if block is None:
            return False
        self.meters.append(block.peak())
        self.output.put(block)
        return True

    def render_limited(self, ceiling: float) -> bool:
        block = self.mix()  # leak: a block above the ceiling is reported and neither queued nor dropped
        if block is None:
            return False
        peak = block.peak()
        if peak > ceiling:
            log.warning("clipping at %.2f", peak)
            return False
        self.output.put(block)
        return True

    def play(self) -> Optional[list[float]]:
        if self.output.empty():
            return None
        block = self.output.get()
        samples = list(block.samples)
        block.drop()
        return samples

    def flush(self) -> int:
        count = 0
        while not self.output.empty():
            self.output.get().drop()
            count += 1
        return count

    def tap(self) -> bool:
        block = self.mix()  # leak: monitor_peak takes it out of the queue and drops no reference
        if block is None:
            return False
        self.monitor.put(block)
        return True

    def monitor_peak(self) -> float:
        peak = 0.0
        while not self.monitor.empty():
            block = self.monitor.get()
            peak = max(peak, block.peak())
        return peak

    def stereo(self, pan: float) -> Optional[tuple[list[float], list[float]]]:
        pair = self.ring.fetch_pair()  # clean: both are dropped before the return
        if pair is None:
            return None
        left, right = pair
        mono = self.mix()  # clean: dropped after the copy, nothing held where it is None
        if mono is not None:
            left.add(mono)
            right.add(mono)
            mono.drop()
        left.gain(1.0 - pan)
        right.gain(pan)
        result = list(left.samples), list(right.samples)
        left.drop()
        right.drop()
        return result

    def silence(self) -> list[float]:
        block = self.ring.fetch()  # leak: copied into a list and never dropped
        if block is None:
            return [0.0] * self.ring.length
        return list(block.samples)
