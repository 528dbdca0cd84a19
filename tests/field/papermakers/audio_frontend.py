"""Streaming audio front end: PCM rings, mel frames and encoder windows."""
from __future__ import annotations

import math
import threading
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Callable, Iterator, Optional

import torch

SAMPLE_RATE = 16_000
HOP = 160
N_MELS = 128


class RingBank:
    """A fixed number of PCM rings, one per live microphone."""

    def __init__(self, count: int, seconds: float):
        size = int(seconds * SAMPLE_RATE)
        self.rings = [array("h", bytes(2 * size)) for _ in range(count)]
        self.mask = (1 << count) - 1
        self.lock = threading.Lock()

    def lease(self) -> int:
        with self.lock:
            if not self.mask:
                return -1
            low = self.mask & -self.mask
            self.mask ^= low
            return low.bit_length() - 1

    def release(self, ring: int) -> None:
        with self.lock:
            self.mask |= 1 << ring


class MelScratch:
    """Scratch tensors cached by shape and dtype."""

    def __init__(self, device: str):
        self.device = device
        self.cached: defaultdict[tuple, list[torch.Tensor]] = defaultdict(list)

    def get(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        stack = self.cached[shape + (dtype,)]
        if stack:
            return stack.pop()  # clean: returned to the caller
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def give(self, t: torch.Tensor) -> None:
        self.cached[tuple(t.shape) + (t.dtype,)].append(t)

    def regrow(self, t: torch.Tensor, frames: int) -> torch.Tensor:
        """Larger tensor with the same leading content; t goes back."""
        bigger = self.get(t.shape[0], frames, dtype=t.dtype)  # clean: returned in place of t
        bigger[:, : t.shape[1]].copy_(t)
        self.give(t)
        return bigger

    def concat(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = sum(p.shape[1] for p in parts)
        out = self.get(N_MELS, total)  # leak: odd totals return a padded copy and drop the pooled tensor
        at = 0
        for p in parts:
            out[:, at : at + p.shape[1]].copy_(p)
            at += p.shape[1]
        if total % 2:
            return torch.nn.functional.pad(out, (0, 1))
        return out


@dataclass
class Utterance:
    uid: str
    ring: int = -1
    mel: Optional[torch.Tensor] = None
    windows: list[torch.Tensor] = field(default_factory=list)
    muted: bool = False


class MelExtractor:
    def __init__(self, scratch: MelScratch, filters: torch.Tensor):
        self.scratch = scratch
        self.filters = filters

    def power(self, pcm: torch.Tensor) -> torch.Tensor:
        """Pooled power spectrum [freq, frames]; the caller gives it back."""
        frames = pcm.numel() // HOP
        spec = self.scratch.get(self.filters.shape[1], frames)  # clean: returned, the caller gives it back
        stft = torch.stft(pcm, 400, HOP, return_complex=True)
        torch.abs(stft[:, :frames], out=spec)
        return spec.square_()

    def mel(self, pcm: torch.Tensor) -> torch.Tensor:
        spec = self.power(pcm)  # clean: given back after the product
        out = self.scratch.get(N_MELS, spec.shape[1])  # clean: returned to the caller
        torch.mm(self.filters, spec, out=out)
        self.scratch.give(spec)
        return out.clamp_(min=1e-10).log10_()

    def energy(self, pcm: torch.Tensor) -> float:
        return self.power(pcm).sum().item()  # leak: the pooled spectrum is summed and dropped

    def is_speech(self, pcm: torch.Tensor, threshold: float) -> bool:
        spec = self.power(pcm)  # leak: the quiet case returns before give
        level = 10 * math.log10(spec.mean().item() + 1e-9)
        if level < threshold:
            return False
        flat = spec.log().mean().exp() / spec.mean()
        self.scratch.give(spec)
        return flat.item() < 0.5


class AudioSessions:
    def __init__(self, bank: RingBank, extractor: MelExtractor, scratch: MelScratch):
        self.bank = bank
        self.extractor = extractor
        self.scratch = scratch
        self.open_: dict[str, Utterance] = {}

    def open(self, uid: str) -> Utterance | None:
        ring = self.bank.lease()  # clean: near miss, -1 means nothing was leased
        if ring < 0:
            return None
        utt = Utterance(uid, ring)
        self.open_[uid] = utt
        return utt

    def feed(self, utt: Utterance, pcm: torch.Tensor) -> None:
        fresh = self.extractor.mel(pcm)  # leak: dropped for a muted utterance
        if utt.muted:
            return
        if utt.mel is None:
            utt.mel = fresh
            return
        old = utt.mel.shape[1]
        grown = self.scratch.regrow(utt.mel, old + fresh.shape[1])  # clean: near miss, regrow gives back the tensor it replaces
        grown[:, old:].copy_(fresh)
        utt.mel = grown
        self.scratch.give(fresh)

    def cut_windows(self, utt: Utterance, width: int) -> int:
        if utt.mel is None:
            return 0
        for at in range(0, utt.mel.shape[1] - width + 1, width):
            win = self.scratch.get(N_MELS, width)  # clean: moved to utt.windows, which encode or close empties
            win.copy_(utt.mel[:, at : at + width])
            utt.windows.append(win)
        return len(utt.windows)

    def encode(self, utt: Utterance, encoder: Callable) -> list[torch.Tensor]:
        out = []
        while utt.windows:
            win = utt.windows.pop(0)  # clean: given back in finally
            try:
                out.append(encoder(win))
            finally:
                self.scratch.give(win)
        return out

    def encode_last(self, utt: Utterance, encoder: Callable) -> torch.Tensor | None:
        if not utt.windows:
            return None
        win = utt.windows.pop()  # leak: taken off the utterance and not given back after encoding
        return encoder(win).clone()

    def close(self, utt: Utterance) -> None:
        self.open_.pop(utt.uid, None)
        for win in utt.windows:
            self.scratch.give(win)
        utt.windows.clear()
        if utt.mel is not None:
            self.scratch.give(utt.mel)
            utt.mel = None
        if utt.ring >= 0:
            self.bank.release(utt.ring)
            utt.ring = -1

    def windows_of(self, pcm: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
        mel = self.extractor.mel(pcm)  # clean: given back when the generator ends or is closed
        try:
            for at in range(0, mel.shape[1], width):
                yield mel[:, at : at + width]
        finally:
            self.scratch.give(mel)

    def transcribe_file(self, pcm: torch.Tensor, width: int, encoder: Callable) -> list[torch.Tensor]:
        return [encoder(w) for w in self.windows_of(pcm, width)]  # clean: the generator is exhausted
