"""Continuous batching on asyncio: every running request holds a decode slot."""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

log = logging.getLogger("batcher")


class SlotMap:
    def __init__(self, size: int) -> None:
        self._vacant: set[int] = set(range(size))
        self._waiters: deque[asyncio.Future] = deque()

    def take_slot(self) -> int | None:
        if not self._vacant:
            return None
        return self._vacant.pop()  # clean: handed to the caller

    async def wait_slot(self) -> int:
        while not self._vacant:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return self._vacant.pop()  # clean: handed to the caller

    def take_slots(self, count: int) -> list[int]:
        """As many as there are, at most count."""
        return [self._vacant.pop() for _ in range(min(count, len(self._vacant)))]  # clean: handed to the caller

    def drop_slot(self, slot: int) -> None:
        self._vacant.add(slot)
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break


@dataclass
class Generation:
    gen_id: str
    prompt: list[int]
    max_new: int = 16
    slot: int = -1
    output: list[int] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False


class Model:
    vocabulary = 512

    async def prefill(self, slot: int, prompt: list[int]) -> int | None:
        await asyncio.sleep(0)
        return sum(prompt) % self.vocabulary if prompt else None

    async def decode(self, slots: list[int]) -> dict[int, int]:
        await asyncio.sleep(0)
        return {slot: (slot * 31 + 7) % self.vocabulary for slot in slots}


class Batcher:
    def __init__(self, model: Model, slots: SlotMap) -> None:
        self._model = model
        self._slots = slots
        self._active: dict[int, Generation] = {}
        self._queue: asyncio.Queue[Generation] = asyncio.Queue()

    async def admit_next(self) -> bool:
        slot = await self._slots.wait_slot()  # leak: an aborted request at the head of the queue returns with the slot
        gen = await self._queue.get()
        if gen.aborted:
            gen.done.set()
            return False
        gen.slot = slot
        self._active[slot] = gen
        return True

    async def admit_ready(self) -> int:
        admitted = 0
        while not self._queue.empty():
            gen = self._queue.get_nowait()
            slot = self._slots.take_slot()  # clean: near miss, an aborted request drops it before the continue
            if slot is None:
                self._queue.put_nowait(gen)
                break
            if gen.aborted:
                self._slots.drop_slot(slot)
                continue
            gen.slot = slot
            self._active[slot] = gen
            admitted += 1
        return admitted

    async def admit_prefilled(self, gen: Generation) -> bool:
        slot = self._slots.take_slot()  # leak: no first token marks the request done and forgets the slot
        if slot is None:
            return False
        token = await self._model.prefill(slot, gen.prompt)
        if token is None:
            log.info("%s: empty prompt", gen.gen_id)
            gen.done.set()
            return True
        gen.output.append(token)
        gen.slot = slot
        self._active[slot] = gen
        return True

    async def admit_group(self, gens: list[Generation]) -> int:
        slots = self._slots.take_slots(len(gens))  # leak: a request already done is skipped by zip and its slot with it
        for gen, slot in zip(gens, slots):
            if gen.done.is_set():
                continue
            gen.slot = slot
            self._active[slot] = gen
        return len(slots)

    async def admit_all_or_none(self, gens: list[Generation]) -> bool:
        slots = self._slots.take_slots(len(gens))  # clean: near miss, a short list is dropped slot by slot
        if len(slots) < len(gens):
            for slot in slots:
                self._slots.drop_slot(slot)
            return False
        for gen in gens:
            gen.slot = slots.pop()
            self._active[gen.slot] = gen
        return True

    async def step(self) -> int:
        tokens = await self._model.decode(list(self._active))
        for slot, token in tokens.items():
            gen = self._active[slot]
            gen.output.append(token)
            if gen.aborted or len(gen.output) >= gen.max_new:
                self._retire(gen)
        return len(tokens)

    def abort(self, gen: Generation) -> None:
        gen.aborted = True

    def _retire(self, gen: Generation) -> None:
        del self._active[gen.slot]
        self._slots.drop_slot(gen.slot)
        gen.done.set()

    async def score(self, prompt: list[int]) -> int | None:
        slot = await self._slots.wait_slot()  # clean: dropped by the finally
        try:
            return await self._model.prefill(slot, prompt)
        finally:
            self._slots.drop_slot(slot)

    async def warm_up(self, rounds: int) -> int:
        slot = self._slots.take_slot()  # leak: rebound to a fresh slot in every round, only the last is dropped
        for _ in range(rounds):
            if slot is None:
                return 0
            await self._model.prefill(slot, [1])
            slot = self._slots.take_slot()  # leak: the next round rebinds the name over it
        if slot is not None:
            self._slots.drop_slot(slot)
        return rounds

    async def drain(self) -> None:
        while self._active:
            await self.step()
