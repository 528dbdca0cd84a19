"""Continuous batching on a table of decode slots (asyncio)."""
from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Dict, List, Optional, Protocol, Sequence

log = logging.getLogger(__name__)


class Model(Protocol):
    async def prefill(self, slot: int, tokens: Sequence[int]) -> Optional[List[float]]: ...

    async def decode(self, slots: Sequence[int]) -> Dict[int, int]: ...


class SlotTable:
    def __init__(self, size: int) -> None:
        self._open = list(reversed(range(size)))
        self._wake = asyncio.Event()

    def try_claim(self) -> Optional[int]:
        return self._open.pop() if self._open else None

    async def claim(self) -> int:
        while not self._open:
            self._wake.clear()
            await self._wake.wait()
        return self._open.pop()

    def vacate(self, slot: int) -> None:
        self._open.append(slot)
        self._wake.set()


@dataclass
class Pending:
    rid: int
    tokens: List[int]
    limit: int
    cancelled: bool = False
    slot: int = -1
    out: "asyncio.Queue[Optional[int]]" = field(default_factory=asyncio.Queue)
    emitted: int = 0


class Batcher:
    def __init__(self, model: Model, slots: int, eos: int, max_inflight: int = 64) -> None:
        self.model = model
        self.table = SlotTable(slots)
        self.eos = eos
        self._inflight = asyncio.Semaphore(max_inflight)
        self._queue: "asyncio.Queue[Pending]" = asyncio.Queue()
        self._active: Dict[int, Pending] = {}
        self._ids = itertools.count()
        self._tasks: set = set()

    async def enqueue(self, tokens: List[int], limit: int) -> Pending:
        await self._inflight.acquire()  # clean: released by _finish or by _fill for a cancelled request
        req = Pending(next(self._ids), tokens, limit)
        self._queue.put_nowait(req)
        return req

    async def stream(self, tokens: List[int], limit: int) -> AsyncIterator[int]:
        req = await self.enqueue(tokens, limit)
        try:
            while True:
                token = await req.out.get()
                if token is None:
                    return
                yield token
        finally:
            req.cancelled = True

    async def _fill(self) -> None:
        while not self._queue.empty():
            slot = self.table.try_claim()  # leak: continue for a cancelled request keeps the slot
            if slot is None:
                return
            req = self._queue.get_nowait()
            if req.cancelled:
                self._inflight.release()
                continue
            req.slot = slot
            await self.model.prefill(slot, req.tokens)
            self._active[slot] = req

    async def step(self) -> int:
        await self._fill()
        if not self._active:
            return 0
        produced = await self.model.decode(list(self._active))
        for slot, token in produced.items():
            req = self._active[slot]
            req.emitted += 1
            req.out.put_nowait(token)
            if token == self.eos or req.emitted >= req.limit or req.cancelled:
                self._finish(slot)
        return len(produced)

    def _finish(self, slot: int) -> None:
        req = self._active.pop(slot)
        req.out.put_nowait(None)
        self.table.vacate(slot)
        self._inflight.release()

    async def score(self, tokens: List[int]) -> Optional[float]:
        slot = await self.table.claim()  # leak: return None when prefill gave no logits
        logits = await self.model.prefill(slot, tokens)
        if not logits:
            log.info("no logits for a prompt of %d tokens", len(tokens))
            return None
        best = max(logits)
        self.table.vacate(slot)
        return best

    async def embed_batch(self, prompts: List[List[int]]) -> List[Optional[List[float]]]:
        slots = []
        for _ in prompts:
            slots.append(await self.table.claim())  # clean: every slot of the list is vacated below
        vectors = await asyncio.gather(*(self.model.prefill(s, p) for s, p in zip(slots, prompts)))
        for slot in slots:
            self.table.vacate(slot)
        return list(vectors)

    async def embed_long(self, tokens: List[int], chunk: int) -> List[float]:
        parts: Dict[int, int] = {}
        for start in range(0, len(tokens), chunk):
            parts[start] = await self.table.claim()  # leak: slots of empty vectors are not vacated
        pooled: List[float] = []
        for start in sorted(parts):
            slot = parts.pop(start)
            vector = await self.model.prefill(slot, tokens[start:start + chunk])
            if vector:
                pooled.append(sum(vector) / len(vector))
                self.table.vacate(slot)
        return pooled

    async def generate_with_retry(self, tokens: List[int], attempts: int = 3) -> Optional[int]:
        for attempt in range(attempts):
            slot = await self.table.claim()  # leak: a failed attempt claims anew without vacating
            logits = await self.model.prefill(slot, tokens)
            if logits:
                produced = await self.model.decode([slot])
                self.table.vacate(slot)
                return produced.get(slot)
            await asyncio.sleep(0.01 * 2 ** attempt)
        return None

    async def argmax_with_retry(self, tokens: List[int], attempts: int = 3) -> Optional[int]:
        for attempt in range(attempts):
            slot = await self.table.claim()  # clean: near miss, vacated before success is looked at
            logits = await self.model.prefill(slot, tokens)
            self.table.vacate(slot)
            if logits:
                return max(range(len(logits)), key=logits.__getitem__)
            await asyncio.sleep(0.01 * 2 ** attempt)
        return None

    def _spawn(self, coro) -> None:
        task = asyncio.ensure_future(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _warm_one(self, slot: int, tokens: List[int]) -> None:
        with contextlib.suppress(ConnectionError):
            await self.model.prefill(slot, tokens)
        self.table.vacate(slot)

    async def _probe_one(self, slot: int, tokens: List[int]) -> None:
        logits = await self.model.prefill(slot, tokens)
        if logits and max(logits) > 0.5:
            return
        log.warning("probe on slot %d looks flat", slot)
        self.table.vacate(slot)

    async def warm(self, shapes: Sequence[int]) -> None:
        for length in shapes:
            slot = await self.table.claim()  # clean: near miss, the task vacates it
            self._spawn(self._warm_one(slot, [0] * length))

    async def probe(self) -> None:
        slot = self.table.try_claim()  # leak: the task returns early on good logits and keeps the slot
        if slot is not None:
            self._spawn(self._probe_one(slot, [1, 2, 3]))

    @contextlib.asynccontextmanager
    async def exclusive(self, count: int):
        held = [await self.table.claim() for _ in range(count)]  # clean: vacated in finally
        try:
            yield held
        finally:
            for slot in held:
                self.table.vacate(slot)

    async def calibrate(self, tokens: List[int]) -> int:
        async with self.exclusive(2) as (left, right):  # clean: async with
            a = await self.model.prefill(left, tokens)
            b = await self.model.prefill(right, tokens)
            if a == b:
                return 0
        return 1
