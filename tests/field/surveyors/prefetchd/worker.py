from __future__ import annotations

import queue
from typing import Callable, Iterable, Optional

from .arena import ShmArena, ShmBlock

Ready = tuple[int, ShmBlock]


class BatchWorker:
    def __init__(self, arena: ShmArena, encode: Callable[[int], bytes], ready: "queue.Queue[Ready]") -> None:
        self.arena = arena
        self.encode = encode
        self.ready = ready
        self.stopping = False

    def produce(self, indices: Iterable[int]) -> int:
        made = 0
        for index in indices:
            block = self.arena.attach(10.0)  # clean: near miss, detached when stopping or too small, else it goes out through ready
            if block is None:
                break
            if self.stopping or not block.write(self.encode(index)):
                self.arena.detach(block)
                continue
            self.ready.put((index, block))
            made += 1
        return made

    def produce_checked(self, index: int, expected: int) -> Optional[int]:
        block = self.arena.attach(10.0)  # leak: a payload of unexpected length returns None with the block attached
        if block is None:
            return None
        payload = self.encode(index)
        if len(payload) != expected or not block.write(payload):
            return None
        self.ready.put((index, block))
        return block.filled

    def measure(self, index: int) -> int:
        block = self.arena.attach(1.0)  # clean: near miss, finally detaches also after the handled ValueError
        if block is None:
            return 0
        try:
            block.write(self.encode(index))
            return block.filled
        except ValueError:
            return 0
        finally:
            self.arena.detach(block)
