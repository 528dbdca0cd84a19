"""One training step with offload."""
from __future__ import annotations

from typing import List, Optional, Sequence

from .hooks import OffloadHooks, Packed
from .pinned import PinnedBuffer
from .streams import CopyStream


class RecomputeNeeded(Exception):
    pass


class OffloadSession:
    def __init__(self, hooks: OffloadHooks, keep_rng: bool = False):
        self.hooks = hooks
        self.keep_rng = keep_rng
        self.saved: List[Packed] = []
        self._rng: Optional[PinnedBuffer] = None
        self._stream: Optional[CopyStream] = None

    def __enter__(self) -> "OffloadSession":
        self._stream = self.hooks.streams.borrow()  # leak: __exit__ returns before the give_back on RecomputeNeeded
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is RecomputeNeeded:
            self.backward()
            return True
        if self._stream is not None:
            self.hooks.streams.give_back(self._stream)
            self._stream = None
        return False

    def save_rng(self, state: bytes) -> None:
        if self.keep_rng and self._rng is None:
            self._rng = self.hooks.host.pin(len(state))  # clean: near miss, kept in the field under the flag that restore_rng tests
            if self._rng is not None:
                self._rng.write(state)

    def restore_rng(self) -> bytes:
        if not self.keep_rng or self._rng is None:
            return b""
        state = self._rng.read()
        self.hooks.host.unpin(self._rng)
        self._rng = None
        return state

    def forward(self, acts: Sequence[bytes]) -> None:
        for i, act in enumerate(acts):
            self.saved.append(self.hooks.pack(i, act))  # clean: kept in saved, backward unpacks

    def backward(self) -> int:
        total = 0
        while self.saved:
            total += len(self.hooks.unpack(self.saved.pop()))
        return total

    def digest(self, act: bytes) -> int:
        packed = self.hooks.pack(-1, act)  # leak: an Offloaded record is read and dropped without unpack
        if isinstance(packed, bytes):
            return sum(packed) & 0xFFFF
        return sum(packed.buf.read()) & 0xFFFF
