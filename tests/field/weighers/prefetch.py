"""Asyncio prefetcher of a training data pipeline: remote ranges land in a fixed set of host frames."""
import asyncio
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Frame:
    index: int
    data: torch.Tensor
    used: int = 0


class FrameSet:
    def __init__(self, count, size):
        self._frames = asyncio.Queue()
        for i in range(count):
            self._frames.put_nowait(Frame(i, torch.empty(size, dtype=torch.uint8)))

    async def claim(self):
        return await self._frames.get()

    def put_back(self, frame):
        frame.used = 0
        self._frames.put_nowait(frame)


@dataclass
class Prefetcher:
    frames: FrameSet
    client: object
    width: int = 8
    stats: dict = field(default_factory=dict)

    async def fill(self, key, start, stop):
        """A frame with one remote range. It is the caller's, or None where the range is gone."""
        frame = await self.frames.claim()  # clean: near miss, returned or put back
        got = await self.client.read_into(key, start, stop, frame.data)
        if got <= 0:
            self.frames.put_back(frame)
            return None
        frame.used = got
        return frame

    async def read_many(self, keys, size):
        """Ranges in groups of `width`, yielded as tensors of their own."""
        out = []
        for at in range(0, len(keys), self.width):
            group = keys[at:at + self.width]
            lanes = [await self.frames.claim() for _ in range(self.width)]  # leak: the last group is shorter, zip stops
            reads = [self.client.read_into(k, 0, size, lane.data) for k, lane in zip(group, lanes)]
            counts = await asyncio.gather(*reads)
            for count, lane in zip(counts, lanes):
                if count > 0:
                    out.append(lane.data[:count].clone())
                self.frames.put_back(lane)
            self.stats["groups"] = self.stats.get("groups", 0) + 1
        return out

    async def read_pairs(self, pairs, size):
        """Image and caption of each sample; a sample with either half missing is skipped."""
        samples, skipped, repeated = [], 0, 0
        seen = set()
        began = asyncio.get_running_loop().time()
        for at in range(0, len(pairs), self.width):
            group = pairs[at:at + self.width]
            lanes = [await self.frames.claim() for _ in range(len(group))]  # clean: near miss, one for each of the group
            for (image_key, text_key), lane in zip(group, lanes):
                count = 0
                for attempt in range(3):
                    count = await self.client.read_into(image_key, 0, size, lane.data)
                    if count >= 0:
                        break
                    await asyncio.sleep(0.05 * 2 ** attempt)
                else:
                    self.stats["failed"] = self.stats.get("failed", 0) + 1
                image = lane.data[:count].clone() if count > 0 else None
                self.frames.put_back(lane)
                caption = await self.fill(text_key, 0, size)  # leak: kept frame when the image half is missing
                if image is None or caption is None:
                    skipped += 1
                    continue
                text = bytes(caption.data[:caption.used].tolist()).decode("utf-8", "replace")
                self.frames.put_back(caption)
                text = " ".join(text.split())
                if not text:
                    skipped += 1
                    continue
                mark = (image.numel(), int(image[:4096].sum(dtype=torch.int64)), text)
                if mark in seen:
                    repeated += 1
                    continue
                seen.add(mark)
                samples.append((image, text))
            if at and at % (64 * self.width) == 0:
                spent = asyncio.get_running_loop().time() - began
                self.stats["rate"] = len(samples) / max(spent, 1e-6)
        self.stats["repeated"] = self.stats.get("repeated", 0) + repeated
        self.stats["skipped"] = self.stats.get("skipped", 0) + skipped
        return samples

    async def join_halves(self, key, size):
        half = size // 2
        low, high = await asyncio.gather(
            self.fill(key, 0, half),  # leak: lost when only the high half is missing
            self.fill(key, half, size),  # clean: near miss, None on the early return, put back below
        )
        if high is None:
            self.stats["short"] = self.stats.get("short", 0) + 1
            return None
        if low is None:
            self.frames.put_back(high)
            return None
        joined = torch.cat([low.data[:low.used], high.data[:high.used]])
        for frame in (low, high):
            self.frames.put_back(frame)
        return joined

    async def sweep(self, keys, size):
        """Fill everything at once (never more keys than frames), then sort out what came."""
        results = await asyncio.gather(*(self.fill(k, 0, size) for k in keys))  # clean: near miss, every frame put back
        table = {}
        for key, frame in zip(keys, results):
            if frame is None:
                continue
            table[key] = frame.data[:frame.used].sum(dtype=torch.int64).item()
            self.frames.put_back(frame)
        return table

    async def probe(self, keys, size, wanted):
        """First range that starts with the wanted bytes."""
        found = None
        for key in keys:
            if (frame := await self.fill(key, 0, size)) is None:  # leak: match returns with the frame still out
                continue
            head = frame.data[:len(wanted)]
            if bytes(head.tolist()) == wanted:
                found = key
                self.stats["probe"] = key
                return found
            self.frames.put_back(frame)
        else:
            self.stats["probe"] = None
        return found
