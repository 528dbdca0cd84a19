"""Reading of shards back, with read-ahead into staging."""
from __future__ import annotations

import collections
import json
import os
from typing import Iterator, Optional

import torch

from .staging import Region, StagingArena


class Restorer:
    def __init__(self, arena: StagingArena, root: str, rank: int, depth: int = 4) -> None:
        self.arena = arena
        self.root = root
        self.rank = rank
        self.depth = depth
        self.corrupt: list[str] = []

    def _base(self, step: int) -> str:
        return os.path.join(self.root, f"step{step}", f"rank{self.rank}.bin")

    def index(self, step: int) -> dict:
        path = self._base(step) + ".json"
        if not os.path.exists(path):
            return {}
        handle = open(path)  # leak: never closed, only json is taken from it
        return {k: tuple(v) for k, v in json.load(handle).items()}

    def open_shard(self, step: int):
        """The shard's file, at its start; None when the step has none."""
        path = self._base(step)
        if not os.path.exists(path):
            return None
        f = open(path, "rb", buffering=0)  # clean: handed to the caller
        return f

    def _load(self, f, offset: int, size: int) -> Optional[Region]:
        region = self.arena.reserve(size, timeout=10.0)  # clean: near miss, freed when short, else returned
        if region is None:
            return None
        f.seek(offset)
        got = f.readinto(memoryview(region.view().numpy()))
        if got != size:
            region.free()
            return None
        return region

    def read_ahead(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, device bytes), with `depth` regions loaded in advance."""
        f = self.open_shard(step)  # clean: closed in finally
        if f is None:
            return
        ahead: collections.deque = collections.deque()
        try:
            for name, (offset, size) in self.index(step).items():
                region = self._load(f, offset, size)  # clean: near miss, queued and freed when its turn comes
                if region is None:
                    self.corrupt.append(name)
                    continue
                ahead.append((name, region))
                if len(ahead) > self.depth:
                    done, first = ahead.popleft()
                    data = first.view().cuda()
                    first.free()
                    yield done, data
            while ahead:
                done, first = ahead.popleft()
                data = first.view().cuda()
                first.free()
                yield done, data
        finally:
            f.close()
            for _, region in ahead:
                region.free()

    def into(self, step: int, state: dict[str, torch.Tensor]) -> int:
        """Copies what fits into the given state; returns how many tensors were filled."""
        f = self.open_shard(step)  # clean: closed after the loop
        if f is None:
            return 0
        filled = 0
        for name, (offset, size) in self.index(step).items():
            target = state.get(name)
            if target is None:
                continue
            region = self._load(f, offset, size)  # leak: a wrong size continues without free
            if region is None:
                self.corrupt.append(name)
                continue
            if target.numel() * target.element_size() != size:
                self.corrupt.append(name)
                continue
            target.view(torch.uint8).reshape(-1).copy_(region.view())
            region.free()
            filled += 1
        f.close()
        return filled

    def newest(self) -> Optional[int]:
        """The newest step whose shard opens and is as long as its index says."""
        steps = sorted((int(d[4:]) for d in os.listdir(self.root) if d.startswith("step")), reverse=True)
        for step in steps:
            f = self.open_shard(step)  # leak: every step tried stays open
            if f is None:
                continue
            want = sum(size for _, size in self.index(step).values())
            f.seek(0, os.SEEK_END)
            if f.tell() == want:
                return step
        return None
