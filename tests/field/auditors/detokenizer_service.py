from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Optional


class DecoderState:
    def __init__(self) -> None:
        self.prefix = ""
        self.read_offset = 0

    def feed(self, token: int) -> str:
        self.read_offset += 1
        if token < 0:
            raise UnicodeError(token)
        self.prefix += chr(97 + token % 26)
        return self.prefix[-1]


class DecoderStatePool:
    def __init__(self, size: int) -> None:
        self._free: deque[DecoderState] = deque(DecoderState() for _ in range(size))
        self._waiters: deque[asyncio.Future[DecoderState]] = deque()

    async def obtain(self) -> DecoderState:
        if self._free:
            return self._free.popleft()
        waiter: asyncio.Future[DecoderState] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.surrender(waiter.result())
            raise

    def obtain_nowait(self) -> Optional[DecoderState]:
        return self._free.popleft() if self._free else None

    def surrender(self, state: DecoderState) -> None:
        state.prefix, state.read_offset = "", 0
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(state)
                return
        self._free.append(state)


class StreamSeats:
    def __init__(self, seats: int) -> None:
        self.open = seats

    def sit(self) -> bool:
        if self.open == 0:
            return False
        self.open -= 1
        return True

    def stand(self) -> None:
        self.open += 1


@dataclass
class Stream:
    rid: str
    state: DecoderState
    seated: bool = False
    queue: asyncio.Queue[Optional[str]] = field(default_factory=asyncio.Queue)


class DetokenizerService:
    def __init__(self, pool: DecoderStatePool, seats: StreamSeats) -> None:
        self.pool = pool
        self.seats = seats
        self.streams: dict[str, Stream] = {}
        self.backlog: asyncio.Queue[tuple[DecoderState, list[int]]] = asyncio.Queue()

    async def open_stream(self, rid: str) -> Optional[Stream]:
        if rid in self.streams:
            return self.streams[rid]
        state = self.pool.obtain_nowait()  # clean: near miss, surrendered when no seat is open and otherwise owned by the stream
        if state is None:
            return None
        if not self.seats.sit():  # leak: finish() stands up again but abort() of a stream gives back its state only
            self.pool.surrender(state)
            return None
        stream = Stream(rid, state, seated=True)
        self.streams[rid] = stream
        return stream

    def open_internal(self, rid: str) -> bool:
        if rid in self.streams:
            return True
        state = self.pool.obtain_nowait()  # clean: near miss, unseated streams too surrender their state in finish() and abort()
        if state is None:
            return False
        self.streams[rid] = Stream(rid, state)
        return True

    def push(self, rid: str, token: int) -> bool:
        stream = self.streams.get(rid)
        if stream is None:
            return False
        try:
            stream.queue.put_nowait(stream.state.feed(token))
        except UnicodeError:
            self.abort(rid)
            return False
        return True

    def finish(self, rid: str) -> None:
        stream = self.streams.pop(rid, None)
        if stream is None:
            return
        stream.queue.put_nowait(None)
        self.pool.surrender(stream.state)
        if stream.seated:
            self.seats.stand()

    def abort(self, rid: str) -> None:
        stream = self.streams.pop(rid, None)
        if stream is None:
            return
        stream.queue.put_nowait(None)
        self.pool.surrender(stream.state)

    async def decode_once(self, tokens: list[int]) -> Optional[str]:
        state = await self.pool.obtain()  # leak: an undecodable token is answered with None before the surrender
        try:
            text = "".join(state.feed(t) for t in tokens)
        except UnicodeError:
            return None
        self.pool.surrender(state)
        return text

    async def decode_slowly(self, tokens: list[int]) -> Optional[str]:
        state = await self.pool.obtain()  # clean: near miss, cancellation and bad tokens both pass the finally
        try:
            for token in tokens:
                state.feed(token)
                await asyncio.sleep(0)
            return state.prefix
        except (UnicodeError, asyncio.CancelledError):
            return None
        finally:
            self.pool.surrender(state)

    def submit(self, tokens: list[int]) -> bool:
        state = self.pool.obtain_nowait()  # leak: worker() takes it out of the backlog and skips empty token lists without a surrender
        if state is None:
            return False
        self.backlog.put_nowait((state, tokens))
        return True

    async def worker(self) -> None:
        while True:
            state, tokens = await self.backlog.get()
            if not tokens:
                continue
            for token in tokens:
                if token >= 0:
                    state.feed(token)
            self.pool.surrender(state)

    async def with_seat(self, tokens: list[int]) -> Optional[str]:
        if not self.seats.sit():  # clean: near miss, the await may be cancelled and the finally stands up all the same
            return None
        try:
            return await self.decode_slowly(tokens)
        finally:
            self.seats.stand()

    async def fan_out(self, batches: list[list[int]]) -> list[str]:
        states: list[DecoderState] = []
        for _ in batches:
            state = self.pool.obtain_nowait()  # leak: the zip ends with the shorter texts and the states after it are not surrendered
            if state is None:
                break
            states.append(state)
        texts: list[str] = []
        for state, tokens in zip(states, (b for b in batches if b)):
            texts.append("".join(state.feed(abs(t)) for t in tokens))
            self.pool.surrender(state)
        return texts
