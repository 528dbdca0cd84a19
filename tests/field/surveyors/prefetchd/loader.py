from __future__ import annotations

import queue
from typing import Iterator, Optional

from .arena import ShmArena, ShmBlock
from .worker import Ready


class PrefetchLoader:
    def __init__(self, arena: ShmArena, ready: "queue.Queue[Ready]") -> None:
        self.arena = arena
        self.ready = ready
        self.reorder: dict[int, ShmBlock] = {}
        self.spare: Optional[ShmBlock] = None
        self.repeats: list[ShmBlock] = []
        self.cursor = 0

    def _next_block(self, timeout: float) -> Optional[ShmBlock]:
        while self.cursor not in self.reorder:
            try:
                index, block = self.ready.get(timeout=timeout)
            except queue.Empty:
                return None
            self.reorder[index] = block
        block = self.reorder.pop(self.cursor)
        self.cursor += 1
        return block

    def batches(self) -> Iterator[bytes]:
        while (block := self._next_block(5.0)) is not None:  # clean: near miss, detached before the yield, so an early end loses nothing
            payload = bytes(block.view[: block.filled])
            self.arena.detach(block)
            yield payload

    def peek_size(self) -> int:
        block = self._next_block(1.0)  # leak: only the size is kept, the block is off the reorder table and not detached
        if block is None:
            return 0
        self.cursor -= 1
        return block.filled

    def skip(self, count: int) -> int:
        skipped = 0
        while skipped < count:
            block = self._next_block(1.0)  # clean: near miss, each skipped block is detached, None ends the loop empty-handed
            if block is None:
                break
            self.arena.detach(block)
            skipped += 1
        return skipped

    def merge_two(self) -> Optional[bytes]:
        first = self._next_block(1.0)  # leak: not detached when the stream ends after it
        if first is None:
            return None
        second = self._next_block(1.0)  # clean: detached with the first one
        if second is None:
            return bytes(first.view[: first.filled])
        merged = bytes(first.view[: first.filled]) + bytes(second.view[: second.filled])
        self.arena.detach(first)
        self.arena.detach(second)
        return merged

    def reserve_spare(self) -> bool:
        if self.spare is not None:
            return True
        self.spare = self.arena.attach(0.1)  # clean: near miss, guarded by the field, close detaches it
        return self.spare is not None

    def repeat_last(self, payload: bytes, times: int) -> int:
        sent = 0
        block: Optional[ShmBlock] = None
        while sent < times:
            block = self.arena.attach(0.5)  # leak: a payload that does not fit breaks out with the block attached
            if block is None or not block.write(payload):
                break
            self.repeats.append(block)
            sent += 1
        return sent

    def close(self) -> None:
        for block in self.reorder.values():
            self.arena.detach(block)
        self.reorder.clear()
        while self.repeats:
            self.arena.detach(self.repeats.pop())
        while not self.ready.empty():
            _, block = self.ready.get_nowait()
            self.arena.detach(block)
        if self.spare is not None:
            self.arena.detach(self.spare)
            self.spare = None
