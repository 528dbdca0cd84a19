"""Vision-encoder output cache: shared entries, embedding credits, pixel staging."""
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Optional

import torch


@dataclass(eq=False)
class FeatureEntry:
    digest: str
    units: int
    data: Optional[torch.Tensor] = None
    referrers: int = 0

    def retain(self) -> None:
        self.referrers += 1

    def relinquish(self) -> None:
        self.referrers -= 1


class EmbeddingCredits:
    def __init__(self, total: int) -> None:
        self.available = total

    def spend(self, units: int) -> bool:
        if units > self.available:
            return False
        self.available -= units
        return True

    def earn_back(self, units: int) -> None:
        self.available += units


class PixelStage:
    """Pinned pixel buffers, addressed through a usage bitmap."""

    def __init__(self, count: int, numel: int) -> None:
        self._busy = torch.zeros(count, dtype=torch.bool)
        self.pixels = torch.empty(count, numel)

    def lend(self) -> Optional[int]:
        idle = (~self._busy).nonzero()
        if idle.numel() == 0:
            return None
        index = int(idle[0])
        self._busy[index] = True
        return index

    def reclaim(self, index: int) -> None:
        self._busy[index] = False


@dataclass(eq=False)
class MMRequest:
    rid: str
    images: list
    entries: list[FeatureEntry] = field(default_factory=list)
    stage: Optional[int] = None


class EncoderCacheManager:
    def __init__(self, credits: EmbeddingCredits, stage: PixelStage, encoder) -> None:
        self.credits, self.stage, self.encoder = credits, stage, encoder
        self.entries: OrderedDict[str, FeatureEntry] = OrderedDict()

    def attach_cached(self, req: MMRequest) -> None:
        for image in req.images:
            entry = self.entries.get(image.digest)
            if entry is None:
                continue
            entry.retain()  # clean: near miss, listed in req.entries, detach() relinquishes
            req.entries.append(entry)

    def encode(self, req: MMRequest, image) -> bool:
        if image.digest in self.entries:
            return True
        if not self.credits.spend(image.units):  # clean: near miss, earned back without stage, else entry's units
            return False
        index = self.stage.lend()  # clean: None-checked, reclaimed after the encoder ran
        if index is None:
            self.credits.earn_back(image.units)
            return False
        self.stage.pixels[index].copy_(image.pixels)
        entry = FeatureEntry(image.digest, image.units)
        entry.data = self.encoder(self.stage.pixels[index])
        self.stage.reclaim(index)
        entry.retain()  # clean: listed in req.entries
        req.entries.append(entry)
        self.entries[image.digest] = entry
        return True

    def encode_video(self, req: MMRequest, frames) -> int:
        done = 0
        for frame in frames:
            if not self.credits.spend(frame.units):  # leak: no stage left breaks with credits spent
                break
            index = self.stage.lend()  # clean: reclaimed at the end of each round
            if index is None:
                break
            entry = FeatureEntry(frame.digest, frame.units)
            entry.data = self.encoder(self.stage.pixels[index].copy_(frame.pixels))
            self.stage.reclaim(index)
            self.entries[frame.digest] = entry
            done += 1
        return done

    def prestage(self, req: MMRequest) -> bool:
        req.stage = self.stage.lend()  # leak: detach() forgets the request's stage buffer
        if req.stage is None:
            return False
        self.stage.pixels[req.stage].copy_(req.images[0].pixels)
        return True

    def similarity(self, digest: str, probe: torch.Tensor) -> float:
        entry = self.entries.get(digest)
        if entry is None:
            return 0.0
        entry.retain()  # leak: an entry without data returns still retained
        if entry.data is None:
            return 0.0
        score = float(entry.data.flatten() @ probe)
        entry.relinquish()
        return score

    def gather(self, req: MMRequest) -> list[torch.Tensor]:
        rows = []
        for entry in req.entries:
            entry.retain()  # clean: near miss, relinquished on both sides of the continue
            if entry.data is None:
                entry.relinquish()
                continue
            rows.append(entry.data.clone())
            entry.relinquish()
        return rows

    def warm_up(self, sample) -> None:
        index = self.stage.lend()  # leak: the handled out-of-memory error skips reclaim
        if index is None:
            return
        try:
            self.encoder(self.stage.pixels[index].copy_(sample))
            self.stage.reclaim(index)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()

    def detach(self, req: MMRequest) -> None:
        for entry in req.entries:
            entry.relinquish()
        req.entries.clear()

    def shrink(self, wanted: int) -> None:
        for digest, entry in list(self.entries.items()):
            if self.credits.available >= wanted:
                return
            if entry.referrers == 0:
                self.credits.earn_back(self.entries.pop(digest).units)
