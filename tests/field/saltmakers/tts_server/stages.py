"""Model stages. A stage that returns a slab gives it to its caller."""
from __future__ import annotations

from typing import Optional

import torch

from .arenas import MelArena, MelSlab, Voice


class Stages:
    def __init__(self, acoustic, vocoder, arena: MelArena):
        self.acoustic = acoustic
        self.vocoder = vocoder
        self.arena = arena

    def synth_mel(self, text: str, voice: Voice) -> Optional[MelSlab]:
        slab = self.arena.slab()  # clean: returned to the caller
        if slab is None:
            return None
        slab.frames = min(len(text) * 8, self.arena.max_frames)
        self.acoustic(text, voice.emb, out=slab.view)
        return slab

    def vocode(self, slab: MelSlab) -> torch.Tensor:
        return self.vocoder(slab.view.unsqueeze(0)).squeeze(0)

    def crossfade(self, a: MelSlab, b: MelSlab, overlap: int) -> MelSlab:
        """Joins two slabs in `a` and gives back `b`."""
        keep = min(b.frames - overlap, self.arena.max_frames - a.frames)
        start = a.frames
        ramp = torch.linspace(0, 1, overlap)
        tail = a.view[:, -overlap:]
        tail.mul_(1 - ramp).add_(b.view[:, :overlap] * ramp)
        a.frames += keep
        a.view[:, start:] = b.view[:, overlap : overlap + keep]
        b.done()
        return a

    def stretch(self, slab: MelSlab, rate: float) -> MelSlab:
        """Changes the tempo; takes over `slab` and returns the slab to use."""
        new = self.arena.slab()  # leak: a rate of one returns the old slab and forgets the new
        if new is None:
            return slab
        if abs(rate - 1.0) < 1e-3:
            return slab
        new.frames = min(int(slab.frames / rate), self.arena.max_frames)
        new.view.copy_(torch.nn.functional.interpolate(slab.view[None], size=new.frames)[0])
        slab.done()
        return new
