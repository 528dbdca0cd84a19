"""Holds blocks back until the streams that may still use them have passed: one list a stream, an event an
entry.

Whoever takes a tensor from the pool has some stream current; every stream seen that way may have been given
work on any block. So a block whose storage has died gets an event on each of them, and waits in the list of
the stream it was drawn under. Events of one stream are reached in order, hence only the heads of the lists
are asked.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from reference_modules.pool.blocks import Block


class EventFences:
    """Fences by CUDA events. `cuda` is torch.cuda, or a stand-in in tests."""

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self._device = device
        self._cuda = cuda or torch.cuda
        self._streams: dict[int, Any] = {}
        self._drawn_under: dict[int, int] = {}
        self._held: dict[int, deque[tuple[list[Any], Block]]] = {}

    def drawn(self, block: Block) -> None:
        """The block goes out while this thread's current stream is the one it works on."""
        stream = self._cuda.current_stream(self._device)
        key = stream.cuda_stream
        self._streams[key] = stream
        self._drawn_under[id(block)] = key

    def hold(self, block: Block) -> bool:
        """Fence the block; False where no stream was ever seen."""
        key = self._drawn_under.pop(id(block), None)
        if key is None:
            return False
        events = []
        for stream in self._streams.values():
            event = self._cuda.Event()
            event.record(stream)
            events.append(event)
        self._held.setdefault(key, deque()).append((events, block))
        return True

    def passed(self) -> list[Block]:
        """Blocks that every stream has passed."""
        free = []
        for held in self._held.values():
            while held and all(event.query() for event in held[0][0]):
                free.append(held.popleft()[1])
        return free

    def wait(self) -> None:
        """Until every fence is passed; the next `passed` returns all blocks."""
        for held in self._held.values():
            for events, _ in held:
                for event in events:
                    event.synchronize()
