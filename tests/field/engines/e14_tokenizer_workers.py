"""Tokenizer replicas for the async front end."""
from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Callable, Iterable

logger = logging.getLogger(__name__)


@dataclass
class Replica:
    ident: int
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    healthy: bool = True
    served: int = 0


@dataclass
class DetokState:
    req_id: str
    replica: Replica
    tokens: list[int] = field(default_factory=list)
    text: str = ""


class ReplicaPool:
    """An asyncio queue of idle replicas; ``checkout`` waits for one."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._idle: asyncio.Queue[Replica] = asyncio.Queue()
        self.retired: list[Replica] = []
        for r in replicas:
            self._idle.put_nowait(r)

    async def checkout(self) -> Replica:
        r = await self._idle.get()  # clean: returned to the caller
        r.served += 1
        return r

    def checkout_nowait(self) -> Replica | None:
        try:
            r = self._idle.get_nowait()  # clean: near miss, the handler runs only when nothing was taken
        except asyncio.QueueEmpty:
            return None
        r.served += 1
        return r

    async def checkout_healthy(self, tries: int) -> Replica | None:
        for _ in range(tries):
            r = await self._idle.get()  # leak: an unhealthy replica is passed over and never put anywhere
            if r.healthy:
                r.served += 1
                return r
            logger.warning("replica %d is unhealthy", r.ident)
        return None

    def checkin(self, r: Replica) -> None:
        if not r.healthy:
            self.retired.append(r)
            return
        self._idle.put_nowait(r)

    @asynccontextmanager
    async def replica(self) -> AsyncIterator[Replica]:
        r = await self.checkout()  # clean: checked in by the finally
        try:
            yield r
        finally:
            self.checkin(r)


class FrontEnd:
    """Encodes prompts and decodes outputs incrementally."""

    def __init__(self, pool: ReplicaPool, max_prompt: int) -> None:
        self.pool = pool
        self.max_prompt = max_prompt
        self._detok: dict[str, DetokState] = {}
        self._sticky: dict[str, Replica] = {}

    async def encode(self, text: str) -> list[int] | None:
        r = await self.pool.checkout()  # leak: a prompt that is too long returns None before the checkin
        ids = await asyncio.to_thread(r.encode, text)
        if len(ids) > self.max_prompt:
            logger.info("prompt of %d tokens refused", len(ids))
            return None
        self.pool.checkin(r)
        return ids

    async def encode_truncated(self, text: str) -> list[int]:
        async with self.pool.replica() as r:  # clean: near miss, both returns lie inside the async with
            ids = await asyncio.to_thread(r.encode, text)
            if len(ids) <= self.max_prompt:
                return ids
            return ids[-self.max_prompt :]

    async def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode with as many replicas as are idle now."""
        crew = [await self.pool.checkout()]  # clean: near miss, the finally checks in the whole crew
        while len(crew) < len(texts):
            extra = self.pool.checkout_nowait()  # clean: joins the crew unless None
            if extra is None:
                break
            crew.append(extra)
        try:
            jobs = [asyncio.to_thread(crew[i % len(crew)].encode, t) for i, t in enumerate(texts)]
            return list(await asyncio.gather(*jobs))
        finally:
            while crew:
                self.pool.checkin(crew.pop())

    async def open_stream(self, req_id: str) -> None:
        if req_id in self._detok:
            return
        r = await self.pool.checkout()  # clean: near miss, a stream opened meanwhile sends it straight back
        if req_id in self._detok:
            self.pool.checkin(r)
            return
        self._detok[req_id] = DetokState(req_id, r)

    async def feed(self, req_id: str, token: int) -> str:
        state = self._detok[req_id]
        state.tokens.append(token)
        text = await asyncio.to_thread(state.replica.decode, state.tokens)
        delta, state.text = text[len(state.text) :], text
        return delta

    def close_stream(self, req_id: str) -> str:
        state = self._detok.pop(req_id, None)
        if state is None:
            return ""
        self.pool.checkin(state.replica)
        return state.text

    async def stick(self, session: str) -> Replica:
        """Bind a session to one replica so that its caches stay warm."""
        r = await self.pool.checkout()  # leak: a session bound before has its replica overwritten
        self._sticky[session] = r
        return r

    def unstick(self, session: str) -> None:
        r = self._sticky.pop(session, None)
        if r is not None:
            self.pool.checkin(r)

    async def rotate(self, session: str) -> None:
        """Move a bound session to another replica."""
        r = self.pool.checkout_nowait()  # clean: near miss, unstick returns the former one before the store
        if r is None:
            return
        self.unstick(session)
        self._sticky[session] = r


async def warm_up(pool: ReplicaPool, n: int, sample: str) -> int:
    """Round-trip a sample on several replicas; returns how many passed."""

    async def one() -> bool:
        r = await pool.checkout()  # leak: the handler answers False and keeps the replica
        try:
            r.decode(r.encode(sample))
        except UnicodeError:
            return False
        pool.checkin(r)
        return True

    return sum(await asyncio.gather(*(one() for _ in range(n))))


async def count_tokens(pool: ReplicaPool, texts: list[str]) -> int:
    """Sum of the token counts, on a healthy replica when there is one."""
    r = await pool.checkout_healthy(tries=2)  # clean: near miss, `or` takes a second one only if the first is None
    r = r or await pool.checkout()  # clean: checked in at the end
    total = 0
    for text in texts:
        if not text:
            continue
        total += len(r.encode(text))
    pool.checkin(r)
    return total
