from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Deque, Dict, List, Optional, Protocol

logger = logging.getLogger(__name__)


class Transport(Protocol):
    async def call(self, method: str, payload: Any) -> Any: ...


class Permits:
    """Counts the requests that may be under way at a backend."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._waiters: Deque["asyncio.Future[None]"] = deque()

    async def obtain(self) -> None:
        while self._left == 0:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        self._left -= 1

    def obtain_now(self) -> bool:
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def surrender(self) -> None:
        self._left += 1
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break


@dataclass(eq=False)
class Session:
    transport: Transport
    born: float = field(default_factory=time.monotonic)
    broken: bool = False


class SessionPool:
    def __init__(self, transports: List[Transport], max_age: float) -> None:
        self.max_age = max_age
        self._idle: Deque[Session] = deque(Session(t) for t in transports)
        self._wake = asyncio.Event()

    async def borrow(self) -> Session:
        while not self._idle:
            self._wake.clear()
            await self._wake.wait()
        return self._idle.popleft()

    def borrow_fresh(self) -> Optional[Session]:
        for _ in range(len(self._idle)):
            session = self._idle.popleft()  # clean: near miss, one too old goes to the end of the row again
            if time.monotonic() - session.born > self.max_age:
                self._idle.append(session)
                continue
            return session
        return None

    def restore(self, session: Session) -> None:
        if session.broken:
            session = Session(session.transport)
        self._idle.append(session)
        self._wake.set()


@dataclass
class Stream:
    session: Session
    chunks: "asyncio.Queue[Optional[str]]"
    closed: bool = False


class ScoreGateway:
    def __init__(self, permits: Permits, sessions: SessionPool, timeout: float) -> None:
        self.permits = permits
        self.sessions = sessions
        self.timeout = timeout
        self.streams: Dict[str, Stream] = {}
        self.tasks: Dict[str, "asyncio.Task[Any]"] = {}
        self.control: Optional[Session] = None

    async def score(self, texts: List[str]) -> List[float]:
        await self.permits.obtain()  # clean: near miss, surrendered by the finally on cancellation as well
        try:
            session = await self.sessions.borrow()  # clean: restored by the inner finally
            try:
                return await session.transport.call("score", texts)
            finally:
                self.sessions.restore(session)
        finally:
            self.permits.surrender()

    async def score_bounded(self, texts: List[str]) -> Optional[List[float]]:
        await self.permits.obtain()  # clean: near miss, surrendered in the handler and behind it
        session = await self.sessions.borrow()  # leak: the handled timeout returns without restoring
        try:
            result = await asyncio.wait_for(session.transport.call("score", texts), self.timeout)
        except asyncio.TimeoutError:
            session.broken = True
            self.permits.surrender()
            return None
        self.sessions.restore(session)
        self.permits.surrender()
        return result

    async def score_or_skip(self, texts: List[str]) -> Optional[List[float]]:
        if not self.permits.obtain_now():  # leak: without a fresh session it returns and keeps the permit
            return None
        session = self.sessions.borrow_fresh()  # clean: near miss, None holds nothing, otherwise the finally restores it
        if session is None:
            return None
        try:
            return await session.transport.call("score", texts)
        finally:
            self.sessions.restore(session)
            self.permits.surrender()

    async def _run(self, session: Session, method: str, payload: Any) -> Any:
        try:
            return await session.transport.call(method, payload)
        except asyncio.CancelledError:
            session.broken = True
            raise
        finally:
            self.sessions.restore(session)

    async def submit(self, key: str, payload: Any) -> bool:
        if key in self.tasks:
            return False
        session = await self.sessions.borrow()  # leak: the key may be taken meanwhile and the second check returns with the session
        if key in self.tasks:
            return False
        task = asyncio.create_task(self._run(session, "train_step", payload))
        self.tasks[key] = task
        task.add_done_callback(lambda _: self.tasks.pop(key, None))
        return True

    async def warm(self, count: int) -> int:
        taken: List[Session] = []
        for _ in range(count):
            session = self.sessions.borrow_fresh()  # clean: near miss, the whole list is restored behind the loop
            if session is None:
                break
            taken.append(session)
        replies = await asyncio.gather(*(s.transport.call("ping", None) for s in taken), return_exceptions=True)
        for session, reply in zip(taken, replies):
            session.broken = isinstance(reply, BaseException)
            self.sessions.restore(session)
        return len(taken)

    async def open_stream(self, key: str) -> Stream:
        session = await self.sessions.borrow()  # clean: near miss, kept in the stream, close_stream restores it
        stream = Stream(session, asyncio.Queue())
        old = self.streams.pop(key, None)
        if old is not None:
            self._end(old)
        self.streams[key] = stream
        return stream

    def _end(self, stream: Stream) -> None:
        if not stream.closed:
            stream.closed = True
            self.sessions.restore(stream.session)

    def close_stream(self, key: str) -> None:
        stream = self.streams.pop(key, None)
        if stream is not None:
            self._end(stream)

    async def read(self, key: str) -> AsyncIterator[str]:
        await self.permits.obtain()  # leak: an unknown stream ends the generator before the try
        stream = self.streams.get(key)
        if stream is None:
            return
        try:
            while (chunk := await stream.chunks.get()) is not None:
                yield chunk
        finally:
            self.permits.surrender()

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        await self.permits.obtain()  # clean: surrendered when the block is left
        try:
            yield
        finally:
            self.permits.surrender()

    async def attach_control(self) -> None:
        if self.control is None or self.control.broken:
            self.control = await self.sessions.borrow()  # leak: a broken control session is overwritten and its transport never comes back

    async def close(self) -> None:
        for task in list(self.tasks.values()):
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for key in list(self.streams):
            self.close_stream(key)
        if self.control is not None:
            self.sessions.restore(self.control)
            self.control = None
