"""Budget and storage for multimodal encoder outputs."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

logger = logging.getLogger(__name__)


@dataclass
class Image:
    digest: str
    num_embeds: int


@dataclass
class MMRequest:
    req_id: str
    images: list[Image]
    entries: list["Entry"] = field(default_factory=list)
    cross_entry: "Entry | None" = None


class Entry:
    """A span of rows in the embedding arena."""

    __slots__ = ("start", "length", "digest")

    def __init__(self, start: int, length: int, digest: str = "") -> None:
        self.start = start
        self.length = length
        self.digest = digest


class EmbedArena:
    """First-fit allocator over the rows of one big tensor."""

    def __init__(self, rows: int, dim: int) -> None:
        self.data = torch.zeros(rows, dim)
        self._holes: list[tuple[int, int]] = [(0, rows)]
        self._live: set[int] = set()

    def allocate(self, length: int) -> Entry | None:
        for i, (start, size) in enumerate(self._holes):
            if size < length:
                continue
            del self._holes[i]  # clean: the span becomes the entry, the remainder goes back to the holes
            if size > length:
                self._holes.insert(i, (start + length, size - length))
            self._live.add(start)
            return Entry(start, length)
        return None

    def allocate_aligned(self, length: int, align: int) -> Entry | None:
        """Like ``allocate``, with the start on a multiple of ``align``."""
        for i, (start, size) in enumerate(self._holes):
            pad = -start % align
            if size < length + pad:
                continue
            del self._holes[i]  # leak: the padding in front of the span goes to nobody
            tail = size - pad - length
            if tail:
                self._holes.append((start + pad + length, tail))
            self._live.add(start + pad)
            return Entry(start + pad, length)
        return None

    def deallocate(self, entry: Entry) -> None:
        self._live.remove(entry.start)
        self._holes.append((entry.start, entry.length))
        self._holes.sort()
        merged: list[tuple[int, int]] = []
        for start, size in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._holes = merged

    def view(self, entry: Entry) -> torch.Tensor:
        return self.data[entry.start : entry.start + entry.length]


class EncoderScheduler:
    """Decides which images of a request are encoded in this step."""

    def __init__(self, arena: EmbedArena, encoder: torch.nn.Module) -> None:
        self.arena = arena
        self.encoder = encoder
        self._by_digest: dict[str, Entry] = {}

    def schedule_all(self, req: MMRequest) -> bool:
        """All images of the request or none."""
        got: list[Entry] = []
        for image in req.images:
            entry = self.arena.allocate(image.num_embeds)  # clean: near miss, on a shortage the loop below gives back the earlier ones
            if entry is None:
                for g in got:
                    self.arena.deallocate(g)
                return False
            got.append(entry)
        req.entries.extend(got)
        return True

    def schedule_some(self, req: MMRequest, budget: int) -> list[Entry]:
        """As many images as fit, in order."""
        out: list[Entry] = []
        for image in req.images[len(req.entries) :]:
            entry = self.arena.allocate(image.num_embeds)  # leak: the break on the budget forgets the entry just taken
            if entry is None or budget < image.num_embeds:
                break
            budget -= image.num_embeds
            entry.digest = image.digest
            out.append(entry)
        req.entries.extend(out)
        return out

    def cross_attention(self, req: MMRequest, length: int) -> bool:
        if req.cross_entry is not None:
            return True
        req.cross_entry = self.arena.allocate_aligned(length, 64)  # leak: finish forgets the cross entry
        return req.cross_entry is not None

    def shared(self, image: Image) -> Entry | None:
        """One entry per distinct image, kept until ``reset``."""
        entry = self._by_digest.get(image.digest)
        if entry is None:
            entry = self.arena.allocate(image.num_embeds)  # clean: near miss, kept by digest only when it is one
            if entry is not None:
                entry.digest = image.digest
                self._by_digest[image.digest] = entry
        return entry

    def replace_image(self, req: MMRequest, index: int, image: Image) -> bool:
        """Swap one image of a request for another before it is encoded."""
        entry = self.arena.allocate(image.num_embeds)  # leak: put over the entry of the old image, which stays allocated
        if entry is None:
            return False
        req.images[index] = image
        req.entries[index] = entry
        return True

    def finish(self, req: MMRequest) -> None:
        for entry in req.entries:
            self.arena.deallocate(entry)
        req.entries.clear()

    def reset(self) -> None:
        for entry in self._by_digest.values():
            self.arena.deallocate(entry)
        self._by_digest = {}

    def profile(self, pixel_batch: torch.Tensor, num_embeds: int) -> float:
        """Run the encoder once and report the mean norm of its output."""
        entry = self.arena.allocate(num_embeds)  # clean: deallocated on the only way on after the None check
        if entry is None:
            raise RuntimeError("arena too small for profiling")
        dst = self.arena.view(entry)
        dst.copy_(self.encoder(pixel_batch)[:num_embeds])
        norm = float(dst.norm(dim=-1).mean()) if num_embeds else 0.0
        self.arena.deallocate(entry)
        return norm
