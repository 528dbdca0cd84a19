"""Consumer half of a KV connector: receives layers for remote prefixes and binds them to requests."""
from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Awaitable, Callable, DefaultDict, Dict, List, Optional, Set

import torch

logger = logging.getLogger(__name__)


@dataclass
class RecvConfig:
    blocks: int = 128
    block_elems: int = 256
    load_async: bool = True


class RecvBuffers:
    def __init__(self, cfg: RecvConfig) -> None:
        self._mem = torch.zeros(cfg.blocks, cfg.block_elems)
        self._idle: Set[int] = set(range(cfg.blocks))

    def reserve_buf(self) -> int:
        if not self._idle:
            raise MemoryError("recv buffers")
        return self._idle.pop()

    def unreserve_buf(self, idx: int) -> None:
        self._idle.add(idx)

    def __getitem__(self, idx: int) -> torch.Tensor:
        return self._mem[idx]


Fetch = Callable[[str, int, torch.Tensor], Awaitable[bool]]


class KVConsumer:
    def __init__(self, cfg: RecvConfig, bufs: RecvBuffers, fetch: Fetch) -> None:
        self.cfg = cfg
        self.bufs = bufs
        self.fetch = fetch
        self.loaded: DefaultDict[str, List[int]] = defaultdict(list)
        self.tasks: Dict[str, "asyncio.Task[None]"] = {}
        self.meta_buf: Optional[int] = None

    async def load_one(self, rid: str, layer: int) -> bool:
        idx = self.bufs.reserve_buf()  # clean: unreserved when the fetch says no, else bound to the request
        if not await self.fetch(rid, layer, self.bufs[idx]):
            self.bufs.unreserve_buf(idx)
            return False
        self.loaded[rid].append(idx)
        return True

    async def load_first(self, rid: str, layers: List[int]) -> int:
        for layer in layers:
            idx = self.bufs.reserve_buf()  # leak: layers that miss keep their buffers
            if await self.fetch(rid, layer, self.bufs[idx]):
                self.loaded[rid].append(idx)
                return layer
        return -1

    async def load_first_reuse(self, rid: str, layers: List[int]) -> int:
        idx = self.bufs.reserve_buf()  # clean: near miss, one buffer for all layers, unreserved if none hits
        for layer in layers:
            if await self.fetch(rid, layer, self.bufs[idx]):
                self.loaded[rid].append(idx)
                return layer
        self.bufs.unreserve_buf(idx)
        return -1

    async def load_gather(self, rid: str, layers: List[int]) -> bool:
        idxs = [self.bufs.reserve_buf() for _ in layers]  # clean: near miss, all go back unless every fetch succeeded
        oks = await asyncio.gather(*(self.fetch(rid, l, self.bufs[i]) for l, i in zip(layers, idxs)))
        if not all(oks):
            for i in idxs:
                self.bufs.unreserve_buf(i)
            return False
        self.loaded[rid].extend(idxs)
        return True

    async def load_tolerant(self, rid: str, layers: List[int]) -> int:
        idxs = [self.bufs.reserve_buf() for _ in layers]  # leak: the buffers of failed fetches go neither back nor to the request
        oks = await asyncio.gather(*(self.fetch(rid, l, self.bufs[i]) for l, i in zip(layers, idxs)))
        good = [i for i, ok in zip(idxs, oks) if ok]
        self.loaded[rid].extend(good)
        return len(good)

    def start_load(self, rid: str, layer: int) -> bool:
        if rid in self.tasks:
            return False
        idx = self.bufs.reserve_buf()  # clean: near miss, the task gets it, or it is used at once and kept
        if self.cfg.load_async:
            self.tasks[rid] = asyncio.ensure_future(self._finish(rid, layer, idx))
        else:
            self.bufs[idx].zero_()
            self.loaded[rid].append(idx)
        return True

    async def _finish(self, rid: str, layer: int, idx: int) -> None:
        ok = await self.fetch(rid, layer, self.bufs[idx])
        self.tasks.pop(rid, None)
        if ok:
            self.loaded[rid].append(idx)
        else:
            self.bufs.unreserve_buf(idx)

    def start_probe(self, rid: str, layer: int) -> bool:
        if rid in self.tasks:
            return False
        idx = self.bufs.reserve_buf()  # leak: the task looks at it and never gives it back
        self.tasks[rid] = asyncio.ensure_future(self._probe(rid, layer, idx))
        return True

    async def _probe(self, rid: str, layer: int, idx: int) -> None:
        ok = await self.fetch(rid, layer, self.bufs[idx])
        logger.info("probe of %s: %s", rid, ok)
        self.tasks.pop(rid, None)

    def set_meta(self, values: torch.Tensor) -> None:
        if self.meta_buf is not None:
            self.bufs.unreserve_buf(self.meta_buf)
        self.meta_buf = self.bufs.reserve_buf()  # clean: the old one goes back first, close frees the last
        self.bufs[self.meta_buf][: values.numel()].copy_(values)

    def free_request(self, rid: str) -> None:
        for idx in self.loaded.pop(rid, []):
            self.bufs.unreserve_buf(idx)

    def truncate(self, rid: str, keep: int) -> None:
        idxs = self.loaded[rid]
        while len(idxs) > keep:
            self.bufs.unreserve_buf(idxs.pop())

    async def checksum(self, rid: str, layer: int) -> float:
        idx = self.bufs.reserve_buf()  # leak: a fetch without success returns nan and keeps the buffer reserved
        ok = await self.fetch(rid, layer, self.bufs[idx])
        if not ok:
            return float("nan")
        s = float(self.bufs[idx].sum())
        self.bufs.unreserve_buf(idx)
        return s

    def close(self) -> None:
        for rid in list(self.loaded):
            self.free_request(rid)
        if self.meta_buf is not None:
            self.bufs.unreserve_buf(self.meta_buf)
            self.meta_buf = None
