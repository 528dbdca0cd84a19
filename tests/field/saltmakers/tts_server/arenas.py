"""What the stages take and give back: mel slabs, voices and the request gate."""
from __future__ import annotations

import threading
from typing import Callable, Optional

import torch


class MelSlab:
    """A row of the arena. `done()` hands it back."""

    __slots__ = ("arena", "index", "frames")

    def __init__(self, arena: "MelArena", index: int):
        self.arena = arena
        self.index = index
        self.frames = 0

    @property
    def view(self) -> torch.Tensor:
        return self.arena.mel[self.index, :, : self.frames]

    def done(self) -> None:
        self.arena.used[self.index] = False


class MelArena:
    def __init__(self, rows: int, max_frames: int = 2000, mels: int = 80):
        self.mel = torch.zeros(rows, mels, max_frames)
        self.max_frames = max_frames
        self.used = [False] * rows

    def slab(self) -> Optional[MelSlab]:
        for i, taken in enumerate(self.used):
            if not taken:
                self.used[i] = True
                return MelSlab(self, i)
        return None


class Voice:
    def __init__(self, name: str, emb: torch.Tensor):
        self.name = name
        self.emb = emb
        self.holders = 0


class VoiceShelf:
    """Speaker embeddings stay on the device while somebody holds them."""

    def __init__(self, fetch: Callable[[str], Optional[torch.Tensor]]):
        self.fetch = fetch
        self.voices: dict[str, Voice] = {}

    def hold(self, name: str) -> Optional[Voice]:
        voice = self.voices.get(name)
        if voice is None:
            emb = self.fetch(name)
            if emb is None:
                return None
            voice = self.voices[name] = Voice(name, emb)
        voice.holders += 1
        return voice

    def unhold(self, voice: Voice) -> None:
        voice.holders -= 1
        if voice.holders == 0:
            self.voices.pop(voice.name, None)


class Gate:
    """Limits the requests that are in the building at once."""

    def __init__(self, n: int):
        self._mu = threading.Lock()
        self._left = n

    def come_in(self) -> bool:
        with self._mu:
            if self._left == 0:
                return False
            self._left -= 1
            return True

    def go_out(self) -> None:
        with self._mu:
            self._left += 1
