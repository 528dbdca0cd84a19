"""Realtime audio bridge: jitter buffers lent per utterance (asyncio)."""
from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional, Set

Transcriber = Callable[[bytes], Awaitable[str]]


class Jitter:
    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.pcm = bytearray()
        self.capacity = capacity

    def push(self, chunk: bytes) -> bool:
        if len(self.pcm) + len(chunk) > self.capacity:
            return False
        self.pcm += chunk
        return True


class JitterBank:
    """Buffers parked in an asyncio.Queue; lend waits, try_lend does not."""

    def __init__(self, count: int, capacity: int) -> None:
        self._parked: "asyncio.Queue[Jitter]" = asyncio.Queue()
        for n in range(count):
            self._parked.put_nowait(Jitter(n, capacity))

    async def lend(self) -> Jitter:
        return await self._parked.get()

    def try_lend(self) -> Optional[Jitter]:
        return None if self._parked.empty() else self._parked.get_nowait()

    def reclaim(self, jit: Jitter) -> None:
        jit.pcm.clear()
        self._parked.put_nowait(jit)

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[Jitter]:
        jit = await self.lend()  # clean: reclaimed in finally
        try:
            yield jit
        finally:
            self.reclaim(jit)

    @contextlib.asynccontextmanager
    async def scratch(self) -> AsyncIterator[Optional[Jitter]]:
        jit = self.try_lend()  # leak: nothing after the yield runs when the block raises, and Bridge.preview survives that
        yield jit
        if jit is not None:
            self.reclaim(jit)

    @property
    def parked(self) -> int:
        return self._parked.qsize()


class Hangup(Exception):
    pass


class Line:
    """One caller. Chunks of None mean silence, an empty chunk means hangup."""

    def __init__(self, name: str, chunks: List[Optional[bytes]]) -> None:
        self.name = name
        self._chunks = list(chunks)

    async def read(self) -> Optional[bytes]:
        await asyncio.sleep(0)
        if not self._chunks:
            return None
        chunk = self._chunks.pop(0)
        if chunk == b"":
            raise Hangup(self.name)
        return chunk


class Bridge:
    def __init__(self, bank: JitterBank, transcribe: Transcriber) -> None:
        self.bank = bank
        self.transcribe = transcribe
        self.tasks: Set["asyncio.Task[str]"] = set()
        self.talking: Dict[str, Jitter] = {}

    async def utterance(self, line: Line) -> str:
        async with self.bank.lent() as jit:  # clean: async with
            while True:
                chunk = await line.read()
                if chunk is None:
                    break
                if not jit.push(chunk):
                    break
            return await self.transcribe(bytes(jit.pcm))

    async def listen(self, line: Line) -> Optional[str]:
        jit = await self.bank.lend()  # leak: Hangup is caught, None returned without the reclaim
        try:
            while True:
                chunk = await line.read()
                if chunk is None or not jit.push(chunk):
                    break
            text = await self.transcribe(bytes(jit.pcm))
        except Hangup:
            return None
        self.bank.reclaim(jit)
        return text

    async def preview(self, line: Line) -> str:
        try:
            async with self.bank.scratch() as jit:  # clean: the context manager holds it, what is lost is lost there
                if jit is None:
                    return ""
                jit.push(await line.read() or b"")
                return await self.transcribe(bytes(jit.pcm))
        except Hangup:
            return ""

    def spawn(self, payload: bytes) -> Optional["asyncio.Task[str]"]:
        jit = self.bank.try_lend()  # clean: moved to the task, which reclaims it
        if jit is None:
            return None
        jit.push(payload)
        task = asyncio.create_task(self._transcribe_owned(jit))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _transcribe_owned(self, jit: Jitter) -> str:
        try:
            return await self.transcribe(bytes(jit.pcm))
        finally:
            self.bank.reclaim(jit)

    def spawn_short(self, payload: bytes) -> Optional["asyncio.Task[str]"]:
        jit = self.bank.try_lend()  # leak: the task returns "" for a short buffer without reclaiming it
        if jit is None:
            return None
        jit.push(payload)
        return asyncio.create_task(self._transcribe_short(jit))

    async def _transcribe_short(self, jit: Jitter) -> str:
        if len(jit.pcm) < 4:
            return ""
        text = await self.transcribe(bytes(jit.pcm))
        self.bank.reclaim(jit)
        return text

    def spawn_notify(self, payload: bytes) -> Optional["asyncio.Task[str]"]:
        jit = self.bank.try_lend()  # clean: near miss, the done callback reclaims
        if jit is None:
            return None
        jit.push(payload)
        task = asyncio.create_task(self._transcribe_plain(jit))
        task.add_done_callback(functools.partial(self._on_done, jit))
        return task

    async def _transcribe_plain(self, jit: Jitter) -> str:
        return await self.transcribe(bytes(jit.pcm))

    def _on_done(self, jit: Jitter, _task: "asyncio.Task[str]") -> None:
        self.bank.reclaim(jit)

    async def start_talk(self, name: str) -> bool:
        if name in self.talking:
            return False
        jit = self.bank.try_lend()  # clean: moved to the table, stop_talk takes it out and reclaims it
        if jit is None:
            return False
        self.talking[name] = jit
        return True

    def feed(self, name: str, chunk: bytes) -> bool:
        jit = self.talking.get(name)
        return jit is not None and jit.push(chunk)

    async def stop_talk(self, name: str) -> str:
        jit = self.talking.pop(name, None)
        if jit is None:
            return ""
        try:
            return await self.transcribe(bytes(jit.pcm))
        finally:
            self.bank.reclaim(jit)

    async def cross_mix(self, left: Line, right: Line, timeout: float) -> Optional[bytes]:
        a = await self.bank.lend()  # leak: timeout of the second lend is caught, None returned without this one
        try:
            b = await asyncio.wait_for(self.bank.lend(), timeout)  # clean: reclaimed in finally
        except asyncio.TimeoutError:
            return None
        try:
            a.push(await left.read() or b"")
            b.push(await right.read() or b"")
            return bytes(a.pcm) + bytes(b.pcm)
        finally:
            self.bank.reclaim(a)
            self.bank.reclaim(b)

    async def echo_test(self, line: Line, rounds: int) -> int:
        jit: Optional[Jitter] = None
        good = 0
        for _ in range(rounds):
            if jit is None:
                jit = await self.bank.lend()  # clean: near miss, lent once for all rounds, reclaimed behind the loop
            chunk = await line.read()
            if chunk is None:
                continue
            good += jit.push(chunk)
        if jit is not None:
            self.bank.reclaim(jit)
        return good

    async def barge_in(self, line: Line, attempts: int) -> Optional[str]:
        jit = None
        for _ in range(attempts):
            jit = await self.bank.lend()  # leak: rebound on the next attempt while the last one is still lent
            chunk = await line.read()
            if chunk is not None and jit.push(chunk):
                break
        else:
            return None
        text = await self.transcribe(bytes(jit.pcm))
        self.bank.reclaim(jit)
        return text


async def main() -> None:
    async def tr(pcm: bytes) -> str:
        await asyncio.sleep(0)
        return pcm.decode("latin-1")

    bank = JitterBank(4, 64)
    br = Bridge(bank, tr)
    print(await br.utterance(Line("a", [b"ab", b"cd"])))
    t1, t2 = br.spawn(b"task"), br.spawn_notify(b"note")
    print(await asyncio.gather(t1, t2))
    await br.start_talk("x")
    br.feed("x", b"hello")
    print(await br.stop_talk("x"), await br.cross_mix(Line("l", [b"1"]), Line("r", [b"2"]), 1.0))
    print(await br.echo_test(Line("e", [b"1", None, b"2"]), 3), bank.parked)


if __name__ == "__main__":
    asyncio.run(main())
