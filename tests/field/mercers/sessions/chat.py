"""Turns of a conversation."""
from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional

from .store import PageBank, Session, SessionStore

log = logging.getLogger(__name__)
Generate = Callable[[List[int], List[int]], Awaitable[List[int]]]

PAGE = 32


def pages_for(tokens: int) -> int:
    return (tokens + PAGE - 1) // PAGE


class ChatService:
    def __init__(self, store: SessionStore, bank: PageBank, generate: Generate) -> None:
        self.store = store
        self.bank = bank
        self.generate = generate
        self.turns: Dict[str, Session] = {}
        self.typing: Dict[str, Session] = {}

    async def turn(self, sid: str, tokens: List[int]) -> Optional[List[int]]:
        s = self.store.attach(sid)  # clean: detached in finally
        try:
            async with s.lock:
                if not self.store.grow(s, pages_for(len(tokens))):
                    return None
                return await self.generate(s.pages, tokens)
        finally:
            self.store.detach(s)

    async def quick_turn(self, sid: str, tokens: List[int]) -> Optional[List[int]]:
        s = self.store.attach(sid)  # leak: a busy session returns while it is counted
        if s.lock.locked():
            return None
        out = await self.generate(s.pages, tokens)
        self.store.detach(s)
        return out

    async def exclusive_turn(self, sid: str, tokens: List[int]) -> Optional[List[int]]:
        s = self.store.attach(sid)  # clean: detached on both ways out
        await s.lock.acquire()  # leak: no pages, so the return is taken with the lock held
        if not self.store.grow(s, pages_for(len(tokens))):
            self.store.detach(s)
            return None
        out = await self.generate(s.pages, tokens)
        s.lock.release()
        self.store.detach(s)
        return out

    @asynccontextmanager
    async def attached(self, sid: str) -> AsyncIterator[Session]:
        s = self.store.attach(sid)  # clean: detached in finally
        await s.lock.acquire()  # clean: released in finally
        try:
            yield s
        finally:
            s.lock.release()
            self.store.detach(s)

    async def rewind(self, sid: str, tokens: int) -> int:
        async with self.attached(sid) as s:  # clean: ended by the context manager
            return self.store.shrink(s, pages_for(tokens))

    def begin(self, rid: str, sid: str) -> bool:
        if rid in self.turns:
            return False
        self.turns[rid] = self.store.attach(sid)  # clean: near miss, detached by end and by abandon
        return True

    def end(self, rid: str) -> None:
        s = self.turns.pop(rid, None)
        if s is not None:
            self.store.detach(s)

    def abandon(self) -> None:
        for rid in list(self.turns):
            self.end(rid)

    def start_typing(self, rid: str, sid: str) -> None:
        """The user is writing: the session must not expire."""
        if rid not in self.typing:
            self.typing[rid] = self.store.attach(sid)  # leak: stop_typing removes the entry, no detach

    def stop_typing(self, rid: str) -> None:
        s = self.typing.pop(rid, None)
        if s is not None:
            log.debug("%s stopped typing in %s", rid, s.sid)

    def page_count(self, sid: str) -> int:
        s = self.store.find(sid)
        return len(s.pages) if s is not None else 0

    async def title(self, tokens: List[int], tries: int = 3) -> Optional[List[int]]:
        for n in range(tries):
            pages = self.bank.withdraw(pages_for(len(tokens)) + n)  # leak: a poor title retries, no deposit
            if pages is None:
                await asyncio.sleep(0.01)
                continue
            out = await self.generate(pages, tokens)
            if len(out) > 2:
                self.bank.deposit(pages)
                return out
        return None

    def _copy_pages(self, src: List[int]) -> Optional[List[int]]:
        dst = self.bank.withdraw(len(src))  # clean: handed to the caller
        if dst is None:
            log.info("no pages to copy %d", len(src))
        return dst

    def branch(self, sid: str, new_sid: str) -> bool:
        """Copies a conversation so that it can go on in two ways."""
        src = self.store.find(sid)
        if src is None or self.store.find(new_sid) is not None:
            return False
        dst = self._copy_pages(src.pages)  # clean: near miss, in the new session, expire ends it
        if dst is None:
            return False
        fresh = self.store.attach(new_sid)  # clean: detached two lines on
        fresh.pages.extend(dst)
        self.store.detach(fresh)
        return True

    def compare(self, sid: str, other: str) -> int:
        a = self.store.attach(sid)  # clean: detached on both returns
        b = self.store.attach(other)  # leak: only a is detached when a is empty
        if not a.pages:
            self.store.detach(a)
            return 0
        same = sum(1 for x, y in zip(a.pages, b.pages) if x == y)
        self.store.detach(b)
        self.store.detach(a)
        return same

    def can_branch(self, sid: str) -> bool:
        src = self.store.find(sid)
        if src is None:
            return False
        return self._copy_pages(src.pages) is not None  # leak: the copy is only compared with None
