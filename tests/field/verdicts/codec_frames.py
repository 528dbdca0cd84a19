"""Neural codec decoding for TTS: frames are produced by generators and mixed in a jitter buffer."""
from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch

FRAME = 320


class FrameBin:
    """Counter-based: frames are rows of one tensor, `nxt` chains the free ones."""

    def __init__(self, n: int) -> None:
        self.pcm = torch.zeros(n, FRAME)
        self.nxt = list(range(1, n)) + [-1]
        self.head = 0

    def draw(self) -> int:
        f = self.head
        if f == -1:
            raise OverflowError("frame bin is empty")
        self.head = self.nxt[f]
        return f

    def redraw(self, f: int) -> None:
        self.nxt[f] = self.head
        self.head = f


@dataclass
class Packet:
    seq: int
    frame: int
    last: bool = False


def decode(bin_: FrameBin, codes: Iterable[torch.Tensor], vocoder) -> Generator[int, None, None]:
    for c in codes:
        f = bin_.draw()  # clean: yielded, the consumer owns the frame
        bin_.pcm[f] = vocoder(c)
        yield f


def decode_voiced(bin_: FrameBin, codes: Iterable[torch.Tensor], vocoder) -> Generator[int, None, None]:
    for c in codes:
        f = bin_.draw()  # leak: silent frames are not yielded and not put back
        bin_.pcm[f] = vocoder(c)
        if bin_.pcm[f].abs().max() < 1e-4:
            continue
        yield f


def decode_voiced2(bin_: FrameBin, codes: Iterable[torch.Tensor], vocoder) -> Generator[int, None, None]:
    for c in codes:
        f = bin_.draw()  # clean: near miss, silent frames are put back
        bin_.pcm[f] = vocoder(c)
        if bin_.pcm[f].abs().max() < 1e-4:
            bin_.redraw(f)
            continue
        yield f


def chunks(bin_: FrameBin, codes: Iterable[torch.Tensor], vocoder, per: int) -> Iterator[torch.Tensor]:
    acc: list[int] = []
    for f in decode(bin_, codes, vocoder):  # leak: a rest shorter than per is never yielded nor put back
        acc.append(f)
        if len(acc) == per:
            yield bin_.pcm[acc].flatten().clone()
            for a in acc:
                bin_.redraw(a)
            acc = []


def chunks_padded(bin_: FrameBin, codes: Iterable[torch.Tensor], vocoder, per: int) -> Iterator[torch.Tensor]:
    acc: list[int] = []
    for f in decode(bin_, codes, vocoder):  # clean: near miss, the rest is emptied after the loop
        acc.append(f)
        if len(acc) == per:
            out = bin_.pcm[acc].flatten().clone()
            while acc:
                bin_.redraw(acc.pop())
            yield out
    if acc:
        out = bin_.pcm[acc].flatten().clone()
        while acc:
            bin_.redraw(acc.pop())
        yield out


class JitterBuffer:
    def __init__(self, bin_: FrameBin, depth: int) -> None:
        self.bin = bin_
        self.depth = depth
        self.queue: deque[Packet] = deque()
        self.late: deque[Packet] = deque(maxlen=depth)
        self.next_seq = 0

    def push(self, seq: int, pcm: torch.Tensor) -> None:
        f = self.bin.draw()  # clean: queued, pull and flush put it back
        self.bin.pcm[f] = pcm
        self.queue.append(Packet(seq, f))

    def pull(self) -> torch.Tensor | None:
        if not self.queue:
            return None
        p = self.queue.popleft()
        self.next_seq = p.seq + 1
        out = self.bin.pcm[p.frame].clone()
        self.bin.redraw(p.frame)
        return out

    def push_late(self, seq: int, pcm: torch.Tensor) -> None:
        f = self.bin.draw()  # leak: the bounded deque silently discards the oldest packet with its frame
        self.bin.pcm[f] = pcm
        self.late.append(Packet(seq, f))

    def push_ordered(self, seq: int, pcm: torch.Tensor) -> bool:
        f = self.bin.draw()  # leak: packets from the past are refused after the draw
        self.bin.pcm[f] = pcm
        if seq < self.next_seq:
            return False
        self.queue.append(Packet(seq, f))
        return True

    def flush(self) -> None:
        for p in (*self.queue, *self.late):
            self.bin.redraw(p.frame)
        self.queue.clear()
        self.late.clear()

    def crossfade(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        f = self.bin.draw()  # clean: near miss, ramp is a view of the frame, which goes back by its number
        ramp = self.bin.pcm[f]
        torch.linspace(0, 1, FRAME, out=ramp)
        mixed = a * (1 - ramp) + b * ramp
        self.bin.redraw(f)
        return mixed


def total_energy(bin_: FrameBin, codes: list[torch.Tensor], vocoder) -> float:
    e = 0.0
    with closing(decode_voiced2(bin_, codes, vocoder)) as frames:  # clean: each frame is put back in the loop
        for f in frames:
            e += float(bin_.pcm[f].square().sum())
            bin_.redraw(f)
    return e


def peak(bin_: FrameBin, codes: list[torch.Tensor], vocoder) -> float:
    return max(float(bin_.pcm[f].abs().max()) for f in decode(bin_, codes, vocoder))  # leak: frames are looked at and dropped


def until_silence(bin_: FrameBin, codes: list[torch.Tensor], vocoder) -> int:
    n = 0
    for f in decode(bin_, codes, vocoder):  # leak: the silent frame that breaks the loop is not put back
        if not bin_.pcm[f].any():
            break
        n += 1
        bin_.redraw(f)
    return n
