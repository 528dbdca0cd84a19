"""Multimodal encoder scheduling: a budget of encoder tokens per step and a store of
image features that requests hold by content hash."""
from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable

import torch


class EncoderBudget:
    def __init__(self, tokens: int) -> None:
        self.total = tokens
        self.left = tokens

    def debit(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def credit(self, n: int) -> None:
        self.left = min(self.total, self.left + n)


class Feature:
    def __init__(self, digest: str, data: torch.Tensor) -> None:
        self.digest = digest
        self.data = data
        self.holders = 0


class FeatureStore:
    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.by_digest: dict[str, Feature] = {}

    def hold(self, digest: str) -> Feature | None:
        f = self.by_digest.get(digest)
        if f is not None:
            f.holders += 1
        return f

    def insert_held(self, digest: str, data: torch.Tensor) -> Feature:
        f = self.by_digest.get(digest)
        if f is None:
            self._trim()
            f = self.by_digest[digest] = Feature(digest, data)
        f.holders += 1
        return f

    def unhold(self, f: Feature) -> None:
        f.holders -= 1

    def _trim(self) -> None:
        for d in [d for d, f in self.by_digest.items() if f.holders == 0]:
            if len(self.by_digest) < self.cap:
                return
            del self.by_digest[d]


@dataclass
class Image:
    raw: bytes
    tokens: int
    kind: str = "image"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()


@dataclass
class MMRequest:
    rid: str
    images: list[Image]
    features: list[Feature] = field(default_factory=list)
    debited: int = 0


Encode = Callable[[Image], Awaitable[torch.Tensor | None]]


class EncoderScheduler:
    def __init__(self, store: FeatureStore, budget: EncoderBudget, encode: Encode, lanes: int = 2) -> None:
        self.store = store
        self.budget = budget
        self.encode = encode
        self.lanes = asyncio.Semaphore(lanes)
        self.active: dict[str, MMRequest] = {}

    async def one(self, img: Image) -> Feature | None:
        f = self.store.hold(img.digest)  # clean: returned held to the caller when found
        if f is not None:
            return f
        async with self.lanes:
            data = await self.encode(img)
        if data is None:
            return None
        return self.store.insert_held(img.digest, data)  # clean: returned held to the caller

    async def gather(self, req: MMRequest) -> bool:
        held: list[Feature] = []
        for img in req.images:
            f = await self.one(img)  # leak: features held so far are dropped when one image fails
            if f is None:
                return False
            held.append(f)
        req.features = held
        self.active[req.rid] = req
        return True

    async def gather_partial(self, req: MMRequest) -> int:
        for img in req.images:
            f = await self.one(img)  # clean: near miss, appended to the active request that finish() empties
            if f is None:
                continue
            req.features.append(f)
        self.active[req.rid] = req
        return len(req.features)

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        for f in req.features:
            self.store.unhold(f)
        req.features.clear()
        if req.debited:
            self.budget.credit(req.debited)
            req.debited = 0

    # budget

    def schedule(self, req: MMRequest) -> bool:
        if req.debited:
            return True
        want = sum(i.tokens for i in req.images)
        if not self.budget.debit(want):  # clean: near miss, noted in req.debited and credited by finish()
            return False
        req.debited = want
        self.active[req.rid] = req
        return True

    def schedule_video(self, req: MMRequest, max_frames: int) -> bool:
        want = sum(i.tokens for i in req.images)
        if not self.budget.debit(want):  # leak: too many frames returns False without a credit
            return False
        frames = [i for i in req.images if i.kind == "frame"]
        if len(frames) > max_frames:
            return False
        req.debited = want
        self.active[req.rid] = req
        return True

    async def encode_now(self, img: Image) -> torch.Tensor | None:
        if not self.budget.debit(img.tokens):  # clean: credited in finally when it was debited
            return None
        try:
            return await self.encode(img)
        finally:
            self.budget.credit(img.tokens)

    async def encode_batch(self, imgs: list[Image]) -> list[torch.Tensor]:
        outs = []
        for img in imgs:
            if not self.budget.debit(img.tokens):  # leak: a failed encode continues without a credit
                break
            data = await self.encode(img)
            if data is None:
                continue
            outs.append(data)
            self.budget.credit(img.tokens)
        return outs

    async def encode_retrying(self, img: Image, tries: int = 3) -> torch.Tensor:
        await self.lanes.acquire()  # clean: released in finally after all the tries
        try:
            for _ in range(tries):
                data = await self.encode(img)
                if data is not None:
                    return data
            raise RuntimeError(f"encoder gave nothing for {img.digest}")
        finally:
            self.lanes.release()

    async def encode_polling(self, img: Image, tries: int = 3) -> torch.Tensor | None:
        for attempt in range(tries):
            await self.lanes.acquire()  # leak: each try that yields None goes round with the lane held
            data = await self.encode(img)
            if data is not None:
                self.lanes.release()
                return data
            await asyncio.sleep(0.01 * (attempt + 1))
        return None

    def detach_job(self, img: Image, done: Callable[[torch.Tensor | None], None]) -> asyncio.Task | None:
        if not self.budget.debit(img.tokens):  # clean: near miss, the task's callback credits it
            return None
        task = asyncio.ensure_future(self.encode(img))

        def _finished(t: asyncio.Task) -> None:
            self.budget.credit(img.tokens)
            done(None if t.cancelled() or t.exception() else t.result())

        task.add_done_callback(_finished)
        return task

    # reading of features

    def embedding(self, digest: str, dtype: torch.dtype) -> torch.Tensor | None:
        f = self.store.hold(digest)  # leak: the same-dtype path returns before unhold
        if f is None:
            return None
        if f.data.dtype == dtype:
            return f.data.clone()
        out = f.data.to(dtype)
        self.store.unhold(f)
        return out

    def concat(self, digests: list[str]) -> torch.Tensor:
        held = [self.store.hold(d) for d in digests]  # clean: near miss, all that are not None are unheld in finally
        try:
            return torch.cat([f.data for f in held if f is not None])
        finally:
            for f in held:
                if f is not None:
                    self.store.unhold(f)

    async def stream(self, req: MMRequest) -> AsyncIterator[torch.Tensor]:
        for img in req.images:
            f = await self.one(img)  # clean: unheld in finally around the yield
            if f is None:
                continue
            try:
                yield f.data
            finally:
                self.store.unhold(f)
