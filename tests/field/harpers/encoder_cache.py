"""Cache of multimodal encoder outputs: token budget, shared entries, asynchronous encoding."""
from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable

import torch

log = logging.getLogger(__name__)

Encode = Callable[[bytes], Awaitable[torch.Tensor]]


class TokenBudget:
    def __init__(self, total: int):
        self.left = total
        self._freed = asyncio.Event()

    def charge(self, tokens: int) -> int:
        """Tokens charged: all or none."""
        if tokens > self.left:
            return 0
        self.left -= tokens
        return tokens

    async def charge_wait(self, tokens: int) -> int:
        while tokens > self.left:
            self._freed.clear()
            await self._freed.wait()
        self.left -= tokens
        return tokens

    def refund(self, tokens: int) -> None:
        self.left += tokens
        self._freed.set()


@dataclass
class Encoded:
    digest: str
    output: torch.Tensor
    users: int = 0


class EncoderCache:
    """Entries with users are held; unused ones may be trimmed."""

    def __init__(self) -> None:
        self._entries: dict[str, Encoded] = {}

    def hold(self, digest: str) -> Encoded | None:
        entry = self._entries.get(digest)
        if entry is not None:
            entry.users += 1
        return entry

    def insert(self, digest: str, output: torch.Tensor) -> Encoded:
        """Inserts and holds."""
        entry = self._entries.setdefault(digest, Encoded(digest, output))
        entry.users += 1
        return entry

    def let_go(self, entry: Encoded) -> None:
        entry.users -= 1

    def trim(self) -> int:
        idle = [d for d, e in self._entries.items() if e.users == 0]
        for digest in idle:
            del self._entries[digest]
        return len(idle)


@dataclass
class MMRequest:
    rid: str
    images: list[bytes]
    tokens_each: int = 576
    held: list[Encoded] = field(default_factory=list)
    charged: int = 0


def digest_of(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


class EncoderScheduler:
    def __init__(self, cache: EncoderCache, budget: TokenBudget, encode: Encode):
        self.cache, self.budget, self.encode = cache, budget, encode
        self.running: dict[str, MMRequest] = {}

    async def admit(self, req: MMRequest) -> bool:
        need = req.tokens_each * len(req.images)
        req.charged = self.budget.charge(need)  # clean: near miss, refunded by finish and abort
        if not req.charged:
            return False
        for blob in req.images:
            digest = digest_of(blob)
            entry = self.cache.hold(digest)  # clean: goes into the request, let go by _drop
            if entry is None:
                output = await self.encode(blob)
                entry = self.cache.insert(digest, output)  # clean: goes into the request, let go by _drop
            req.held.append(entry)
        self.running[req.rid] = req
        return True

    def _drop(self, req: MMRequest) -> None:
        while req.held:
            self.cache.let_go(req.held.pop())
        self.budget.refund(req.charged)
        req.charged = 0

    def finish(self, rid: str) -> None:
        self._drop(self.running.pop(rid))

    def abort(self, rid: str) -> bool:
        req = self.running.pop(rid, None)
        if req is None:
            return False
        self._drop(req)
        return True


class VideoScheduler:
    """Frames share one charge. Preempted clips lose their frames and are admitted again."""

    def __init__(self, cache: EncoderCache, budget: TokenBudget, encode: Encode):
        self.cache, self.budget, self.encode = cache, budget, encode
        self.clips: dict[str, MMRequest] = {}
        self.waiting: list[MMRequest] = []

    async def admit(self, req: MMRequest) -> None:
        req.charged = await self.budget.charge_wait(req.tokens_each * len(req.images))  # leak: preempt sets charged to zero without a refund
        for blob in req.images:
            output = await self.encode(blob)
            req.held.append(self.cache.insert(digest_of(blob), output))  # clean: let go by finish and by preempt
        self.clips[req.rid] = req

    def preempt(self, rid: str) -> None:
        req = self.clips.pop(rid)
        for entry in req.held:
            self.cache.let_go(entry)
        req.held = []
        req.charged = 0
        self.waiting.append(req)

    def finish(self, rid: str) -> None:
        req = self.clips.pop(rid)
        for entry in req.held:
            self.cache.let_go(entry)
        req.held = []
        self.budget.refund(req.charged)
        req.charged = 0


async def encode_once(budget: TokenBudget, encode: Encode, blob: bytes, tokens: int) -> torch.Tensor | None:
    got = budget.charge(tokens)  # leak: an empty output returns without a refund
    if not got:
        return None
    output = await encode(blob)
    if output.numel() == 0:
        log.info("encoder gave nothing for %d bytes", len(blob))
        return None
    budget.refund(got)
    return output


@asynccontextmanager
async def charged(budget: TokenBudget, tokens: int) -> AsyncIterator[int]:
    got = await budget.charge_wait(tokens)  # clean: refunded when the block ends
    try:
        yield got
    finally:
        budget.refund(got)


async def encode_batch(budget: TokenBudget, encode: Encode, blobs: list[bytes], each: int) -> list[torch.Tensor]:
    async with charged(budget, each * len(blobs)):  # clean: the manager refunds
        return list(await asyncio.gather(*(encode(b) for b in blobs)))


class HeldEntry:
    """async with HeldEntry(cache, digest) as output"""

    def __init__(self, cache: EncoderCache, digest: str, keep: bool = False):
        self.cache, self.digest, self.keep = cache, digest, keep
        self.entry: Encoded | None = None

    async def __aenter__(self) -> torch.Tensor | None:
        self.entry = self.cache.hold(self.digest)  # clean: let go in __aexit__
        return None if self.entry is None else self.entry.output

    async def __aexit__(self, kind, value, trace) -> bool:
        if self.entry is None:
            return False
        self.cache.let_go(self.entry)
        self.entry = None
        return False


class HeldPair:
    """Holds an image and its thumbnail for the time of a block."""

    def __init__(self, cache: EncoderCache, image: str, thumb: str):
        self.cache, self.image, self.thumb = cache, image, thumb
        self.pair: tuple[Encoded | None, Encoded | None] = (None, None)

    def __enter__(self) -> "HeldPair":
        image = self.cache.hold(self.image)  # leak: __exit__ returns early when the thumbnail was missing
        thumb = self.cache.hold(self.thumb)  # leak: __exit__ returns early when the image was missing
        self.pair = (image, thumb)
        return self

    def __exit__(self, kind, value, trace) -> None:
        image, thumb = self.pair
        if image is None or thumb is None:
            return
        self.cache.let_go(image)
        self.cache.let_go(thumb)


async def similarity(cache: EncoderCache, a: str, b: str) -> float:
    async with HeldEntry(cache, a) as left, HeldEntry(cache, b) as right:  # clean: both let go in __aexit__
        if left is None or right is None:
            return 0.0
        return float((left.flatten() * right.flatten()).sum())


async def lookup_or_encode(cache: EncoderCache, encode: Encode, blob: bytes) -> Encoded:
    """The entry comes held; the caller lets it go."""
    digest = digest_of(blob)
    entry = cache.hold(digest)  # clean: returned
    if entry is not None:
        return entry
    output = await encode(blob)
    return cache.insert(digest, output)  # clean: returned


async def refresh(cache: EncoderCache, encode: Encode, blob: bytes) -> Encoded:
    digest = digest_of(blob)
    entry = cache.hold(digest)  # leak: a stale entry is overwritten while still held
    if entry is not None and not entry.output.isnan().any():
        return entry
    output = await encode(blob)
    entry = cache.insert(digest + ":fresh", output)  # clean: returned
    return entry


async def warm(cache: EncoderCache, encode: Encode, blobs: list[bytes]) -> int:
    """Encodes ahead of time; the entries shall stay trimmable."""
    warmed = 0
    for blob in blobs:
        await lookup_or_encode(cache, encode, blob)  # leak: the result is dropped while held
        warmed += 1
    return warmed


async def pooled_mean(cache: EncoderCache, encode: Encode, blobs: list[bytes]) -> torch.Tensor | None:
    tasks = [asyncio.create_task(lookup_or_encode(cache, encode, b)) for b in blobs]  # clean: near miss, taken out by gather and let go
    entries = await asyncio.gather(*tasks)
    if not entries:
        return None
    mean = torch.stack([e.output.mean(dim=0) for e in entries]).mean(dim=0)
    for entry in entries:
        cache.let_go(entry)
    return mean
