from __future__ import annotations

from contextlib import ExitStack
from typing import Iterable, Iterator

from .mover import CopyCredits, Mover
from .tiers import DiskTier, Frame, MemoryTier


class TierController:
    def __init__(self, gpu_frames: int, host_frames: int, root: str | None = None) -> None:
        self.gpu = MemoryTier("gpu", gpu_frames)
        self.host = MemoryTier("host", host_frames)
        self.mover = Mover(self.gpu, self.host, DiskTier(root), CopyCredits(4))
        self.in_use: dict[str, list[Frame]] = {}

    def begin(self, rid: str, keys: Iterable[str]) -> int:
        frames = self.in_use.setdefault(rid, [])
        for key in keys:
            fr = self.gpu.pin(key)  # clean: near miss, on a miss nothing is pinned, else it is filed for end
            if fr is None:
                if self.mover.promote(key) is None:  # clean: the promoted frame sits in the GPU index
                    break
                fr = self.gpu.pin(key)  # clean: near miss, the first try pinned nothing
            if fr is None:
                break
            frames.append(fr)
        return len(frames)

    def rebegin(self, rid: str, keys: Iterable[str]) -> None:
        frames = []
        for key in keys:
            fr = self.gpu.pin(key)  # leak: the list pinned for the request before is overwritten
            if fr is not None:
                frames.append(fr)
        self.in_use[rid] = frames

    def end(self, rid: str) -> None:
        for fr in self.in_use.pop(rid, []):
            self.gpu.unpin(fr)

    def read(self, keys: Iterable[str]) -> bytes:
        with ExitStack() as stack:
            parts = []
            for key in keys:
                fr = self.gpu.pin(key)  # clean: near miss, the stack unpins on the break as well
                if fr is None:
                    break
                stack.callback(self.gpu.unpin, fr)
                parts.append(fr.payload)
            return b"".join(parts)

    def stream(self, keys: Iterable[str]) -> Iterator[bytes]:
        for key in keys:
            fr = self.gpu.pin(key)  # leak: an empty frame is passed over without being unpinned
            if fr is None:
                return
            if not fr.payload:
                continue
            try:
                yield fr.payload
            finally:
                self.gpu.unpin(fr)

    def has_all(self, keys: Iterable[str]) -> bool:
        return all(self.gpu.pin(k) is not None for k in keys)  # leak: the probe pins what it finds
