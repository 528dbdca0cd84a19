"""Asyncio front of a batched decoder: requests occupy slots of a fixed table."""
import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Dict, List, Optional

logger = logging.getLogger("slots")

class SlotTimeout(Exception):
    """No slot within the queueing time."""

class Draining(Exception):
    """The server is going down."""

class BackendError(Exception):
    """The model process answered with an error."""

@dataclass
class Slot:
    index: int
    owner: Optional[str] = None
    since: float = 0.0

@dataclass
class Request:
    rid: str
    prompt: str
    max_tokens: int = 256
    slot: Optional[Slot] = None
    out: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue)
    error: Optional[str] = None

    def fail(self, why: str) -> None:
        self.error = why
        self.out.put_nowait(None)

class SlotTable:
    def __init__(self, n: int) -> None:
        self._sem = asyncio.Semaphore(n)
        self._free: List[Slot] = [Slot(i) for i in reversed(range(n))]
        self._draining = False
        self.size = n

    async def claim(self, owner: str, timeout: Optional[float] = None) -> Slot:
        if self._draining:
            raise Draining()
        try:
            await asyncio.wait_for(self._sem.acquire(), timeout)  # leak: draining may have begun during the wait, the raise below keeps the permit
        except asyncio.TimeoutError:
            raise SlotTimeout(owner) from None
        if self._draining:
            raise Draining()
        slot = self._free.pop()  # clean: returned to the caller
        slot.owner, slot.since = owner, time.monotonic()
        return slot

    def vacate(self, slot: Slot) -> None:
        slot.owner = None
        self._free.append(slot)
        self._sem.release()

    def drain(self) -> None:
        self._draining = True

    @contextlib.asynccontextmanager
    async def occupied(self, owner: str, timeout: Optional[float] = None):
        slot = await self.claim(owner, timeout)  # clean: vacated in the finally
        try:
            yield slot
        finally:
            self.vacate(slot)

class SessionRegistry:
    """Multi-turn chats keep their slot (and with it their KV cache) between turns."""

    @dataclass
    class Session:
        sid: str
        slot: Slot
        last_used: float
        dirty: bool = False

    def __init__(self, slots: SlotTable, ttl: float) -> None:
        self._slots = slots
        self._ttl = ttl
        self._sessions: Dict[str, SessionRegistry.Session] = {}
        self._mutex = asyncio.Lock()

    async def attach(self, sid: str) -> "SessionRegistry.Session":
        async with self._mutex:
            sess = self._sessions.get(sid)
            if sess is None:
                slot = await self._slots.claim(f"session:{sid}", timeout=5.0)  # leak: expire() vacates the slots of dirty sessions only
                sess = self._sessions[sid] = self.Session(sid, slot, time.monotonic())
            sess.last_used = time.monotonic()
            return sess

    def touch(self, sid: str) -> None:
        self._sessions[sid].dirty = True

    def expire(self) -> int:
        now = time.monotonic()
        stale = [s.sid for s in self._sessions.values() if now - s.last_used > self._ttl]
        for sid in stale:
            sess = self._sessions.pop(sid)
            if sess.dirty:
                logger.info("session %s expired, slot %d", sid, sess.slot.index)
                self._slots.vacate(sess.slot)
        return len(stale)

class Engine:
    def __init__(self, backend, tokenizer, slots: SlotTable, max_len: int = 8192) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.slots = slots
        self.max_len = max_len
        self._active: Dict[int, Request] = {}
        self._wake = asyncio.Event()

    async def submit(self, req: Request) -> Request:
        slot = await self.slots.claim(req.rid, timeout=30.0)  # leak: a prompt over max_len returns before the slot is put on the request
        ids = self.tokenizer.encode(req.prompt)
        if len(ids) + req.max_tokens > self.max_len:
            req.fail(f"{len(ids)} tokens of prompt are too many")
            return req
        await self.backend.prefill(slot.index, ids)
        self._install(req, slot)
        return req

    async def submit_group(self, reqs: List[Request]) -> bool:
        """All or none: a group is only of use when every member runs."""
        claimed: List[Slot] = []
        for req in reqs:
            try:
                claimed.append(await self.slots.claim(req.rid, timeout=0.5))  # clean: near miss, the handler gives all of them back
            except (SlotTimeout, Draining) as exc:
                logger.info("group of %d stopped at %s: %r", len(reqs), req.rid, exc)
                for slot in claimed:
                    self.slots.vacate(slot)
                return False
        for req, slot in zip(reqs, claimed):
            self._install(req, slot)
        return True

    async def generate(self, req: Request) -> AsyncIterator[str]:
        slot = await self.slots.claim(req.rid)  # clean: vacated when the generator is closed
        try:
            ids = self.tokenizer.encode(req.prompt)
            await self.backend.prefill(slot.index, ids)
            for _ in range(req.max_tokens):
                token = (await self.backend.step([slot.index]))[slot.index]
                if token == self.tokenizer.eos:
                    return
                yield self.tokenizer.decode([token])
        finally:
            self.slots.vacate(slot)

    async def best_of(self, req: Request, n: int) -> str:
        slots = await asyncio.gather(*(self.slots.claim(f"{req.rid}#{i}", 10.0) for i in range(n)))  # leak: when one claim raises SlotTimeout the slots of the others are lost
        try:
            outs = await asyncio.gather(*(self._complete(req, s) for s in slots))
        finally:
            for slot in slots:
                self.slots.vacate(slot)
        return max(outs, key=lambda o: o[1])[0]

    async def best_of_or_plain(self, req: Request, n: int) -> str:
        try:
            return await self.best_of(req, n)
        except SlotTimeout:
            async with self.slots.occupied(req.rid) as slot:  # clean: async with
                text, _score = await self._complete(req, slot)
                return text

    async def hedge(self, req: Request) -> str:
        tasks = [asyncio.create_task(self._attempt(req, i)) for i in range(2)]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return done.pop().result()

    async def _attempt(self, req: Request, i: int) -> str:
        slot = await self.slots.claim(f"{req.rid}~{i}")  # clean: near miss, the loser is cancelled and its finally runs
        try:
            text, _score = await self._complete(req, slot)
            return text
        finally:
            self.slots.vacate(slot)

    async def probe(self) -> bool:
        slot = await self.slots.claim("probe", timeout=1.0)  # leak: the BackendError branch returns without vacate
        try:
            await self.backend.step([slot.index])
        except BackendError:
            logger.exception("probe failed on slot %d", slot.index)
            return False
        self.slots.vacate(slot)
        return True

    def _install(self, req: Request, slot: Slot) -> None:
        req.slot = slot
        self._active[slot.index] = req
        self._wake.set()

    async def _complete(self, req: Request, slot: Slot):
        score, pieces = 0.0, []
        await self.backend.prefill(slot.index, self.tokenizer.encode(req.prompt))
        for _ in range(req.max_tokens):
            token, logp = await self.backend.step_scored(slot.index)
            if token == self.tokenizer.eos:
                break
            score += logp
            pieces.append(token)
        return self.tokenizer.decode(pieces), score

    def _finish(self, req: Request) -> None:
        slot, req.slot = req.slot, None
        if slot is None:
            return
        self._active.pop(slot.index, None)
        self.slots.vacate(slot)
        req.out.put_nowait(None)

    def cancel(self, rid: str) -> bool:
        for req in list(self._active.values()):
            if req.rid == rid:
                self._finish(req)
                return True
        return False

    async def run(self) -> None:
        while True:
            if not self._active:
                self._wake.clear()
                await self._wake.wait()
            try:
                tokens = await self.backend.step(list(self._active))
            except BackendError as exc:
                for req in list(self._active.values()):
                    req.fail(str(exc))
                    self._finish(req)
                continue
            for index, token in tokens.items():
                req = self._active.get(index)
                if req is None:
                    continue
                req.max_tokens -= 1
                if token == self.tokenizer.eos or req.max_tokens <= 0:
                    self._finish(req)
                else:
                    req.out.put_nowait(token)
