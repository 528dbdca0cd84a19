"""Adapter slots for multi-LoRA serving, asyncio front end."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import AsyncIterator, Dict, List, Optional


class AdapterError(Exception):
    pass


@dataclass(eq=False)
class AdapterSlot:
    index: int
    adapter: str = ""
    users: int = 0


class AdapterSlots:
    """attach() gives a use of the slot that holds the adapter, detach() ends it."""

    def __init__(self, count: int) -> None:
        self.slots = [AdapterSlot(i) for i in range(count)]
        self._changed = asyncio.Condition()

    def _find(self, adapter: str) -> Optional[AdapterSlot]:
        for slot in self.slots:
            if slot.adapter == adapter:
                return slot
        return next((s for s in self.slots if s.users == 0), None)

    async def attach(self, adapter: str) -> AdapterSlot:
        async with self._changed:
            while (slot := self._find(adapter)) is None:
                await self._changed.wait()
            slot.adapter = adapter
            slot.users += 1
            return slot

    async def detach(self, slot: AdapterSlot) -> None:
        async with self._changed:
            slot.users -= 1
            self._changed.notify_all()

    @property
    def in_use(self) -> int:
        return sum(s.users for s in self.slots)


class LoraServer:
    def __init__(self, slots: AdapterSlots, concurrency: int = 4) -> None:
        self.slots = slots
        self.gate = asyncio.Semaphore(concurrency)
        self.known = {"base", "chat", "code"}
        self.tasks: set = set()
        self.sticky: Dict[str, AdapterSlot] = {}

    async def _forward(self, slot: AdapterSlot, prompt: str) -> str:
        await asyncio.sleep(0)
        if slot.adapter not in self.known:
            raise AdapterError(slot.adapter)
        return f"{slot.adapter}:{prompt}"

    async def generate(self, adapter: str, prompt: str) -> str:
        slot = await self.slots.attach(adapter)  # clean: finally
        try:
            return await self._forward(slot, prompt)
        finally:
            await self.slots.detach(slot)

    async def generate_limited(self, adapter: str, prompt: str) -> Optional[str]:
        await self.gate.acquire()  # leak: an empty prompt returns with the permit
        if not prompt:
            return None
        try:
            return await self.generate(adapter, prompt)
        finally:
            self.gate.release()

    async def generate_deadline(self, adapter: str, prompt: str, timeout: float) -> Optional[str]:
        slot = await self.slots.attach(adapter)  # leak: the handled timeout returns before detach
        try:
            text = await asyncio.wait_for(self._forward(slot, prompt), timeout)
        except asyncio.TimeoutError:
            return None
        await self.slots.detach(slot)
        return text

    async def generate_fallback(self, adapter: str, prompt: str) -> str:
        slot = await self.slots.attach(adapter)  # clean: near miss, detached before the name is rebound
        try:
            text = await self._forward(slot, prompt)
        except AdapterError:
            await self.slots.detach(slot)
            slot = await self.slots.attach("base")  # clean: detached below
            text = await self._forward(slot, prompt)
        await self.slots.detach(slot)
        return text

    async def _measured(self, adapter: str, prompt: str) -> int:
        slot = await self.slots.attach(adapter)  # leak: measure_all gathers with return_exceptions, a failed forward is survived
        text = await self._forward(slot, prompt)
        await self.slots.detach(slot)
        return len(text)

    async def measure_all(self, adapters: List[str], prompt: str) -> List[int]:
        results = await asyncio.gather(*(self._measured(a, prompt) for a in adapters), return_exceptions=True)
        return [r for r in results if isinstance(r, int)]

    async def spawn(self, adapter: str, prompt: str) -> "asyncio.Task[str]":
        await self.gate.acquire()  # clean: near miss, the task's done callback releases the permit
        task = asyncio.create_task(self.generate(adapter, prompt))
        self.tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[str]") -> None:
        self.tasks.discard(task)
        self.gate.release()

    async def stream(self, adapter: str, prompts: List[str]) -> AsyncIterator[str]:
        slot = await self.slots.attach(adapter)  # clean: finally of the async generator
        try:
            for prompt in prompts:
                yield await self._forward(slot, prompt)
        finally:
            await self.slots.detach(slot)

    async def stick(self, session: str, adapter: str) -> None:
        held = self.sticky.get(session)
        if held is not None and held.adapter == adapter:
            return
        self.sticky[session] = await self.slots.attach(adapter)  # leak: a session that changes its adapter overwrites the slot

    async def unstick(self, session: str) -> None:
        slot = self.sticky.pop(session, None)
        if slot is not None:
            await self.slots.detach(slot)

    async def preload(self, adapters: List[str]) -> List[str]:
        loaded: List[str] = []
        for adapter in adapters:
            slot = await self.slots.attach(adapter)  # clean: near miss, detached on both ways through the loop
            try:
                await self._forward(slot, "")
            except AdapterError:
                await self.slots.detach(slot)
                continue
            await self.slots.detach(slot)
            loaded.append(adapter)
        return loaded


async def amain() -> None:
    srv = LoraServer(AdapterSlots(2))
    print(await srv.generate("chat", "hi"), await srv.generate_fallback("nope", "x"))
    task = await srv.spawn("code", "f")  # clean: awaited, its callback releases the permit
    print(await task, await srv.preload(["chat", "bad"]))
    async for text in srv.stream("base", ["a", "b"]):
        print(text)
    print("in use:", srv.slots.in_use)


if __name__ == "__main__":
    asyncio.run(amain())
