"""Upstream connection handling for the inference gateway.

The gateway multiplexes many client streams over a limited number of HTTP/2
connections per replica.  ``ReplicaPool.open`` gives a :class:`Channel`,
``ReplicaPool.park`` puts it back for the next request.
"""
import asyncio
import logging
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Deque, Dict, List, Optional

log = logging.getLogger("gateway.upstream")


class UpstreamBusy(Exception):
    """All channels of the replica are in use."""


class UpstreamReset(ConnectionError):
    """The replica closed the stream in the middle."""


class BadRequest(ValueError):
    pass


@dataclass(eq=False)
class Channel:
    replica: str
    ident: int
    dead: bool = False
    served: int = 0
    last_used: float = 0.0

    async def send(self, payload: Dict[str, Any]) -> None:
        await asyncio.sleep(0)
        if self.dead:
            raise UpstreamReset(self.replica)
        self.served += 1

    async def tokens(self) -> AsyncIterator[str]:
        for i in range(32):
            await asyncio.sleep(0.01)
            if self.dead:
                raise UpstreamReset(self.replica)
            yield f"t{i}"


@dataclass(eq=False)
class StreamState:
    request_id: str
    channel: Optional[Channel] = None
    chunks: List[str] = field(default_factory=list)
    task: Optional["asyncio.Task[None]"] = None


class ReplicaPool:
    def __init__(self, replicas: List[str], per_replica: int = 4) -> None:
        self._parked: Dict[str, Deque[Channel]] = {
            r: deque(Channel(r, i) for i in range(per_replica)) for r in replicas
        }
        self._waiters: Dict[str, Deque["asyncio.Future[None]"]] = defaultdict(deque)

    def open(self, replica: str) -> Channel:
        idle = self._parked[replica]
        if not idle:
            raise UpstreamBusy(replica)
        ch = idle.popleft()  # clean: stamped and returned
        ch.last_used = time.monotonic()
        return ch

    def open_any(self) -> Optional[Channel]:
        for replica, idle in self._parked.items():
            if idle:
                return self.open(replica)  # clean: passed on to the caller
        return None

    def open_fresh(self, replica: str, max_served: int) -> Optional[Channel]:
        """A channel that has not yet served ``max_served`` requests."""
        worn: List[Channel] = []
        found: Optional[Channel] = None
        idle = self._parked[replica]
        while idle and found is None:
            ch = idle.popleft()  # clean: returned as found or extended back from worn
            if ch.served < max_served:
                found = ch
            else:
                worn.append(ch)
        idle.extend(worn)
        return found

    async def open_wait(self, replica: str, timeout: float) -> Channel:
        deadline = time.monotonic() + timeout
        while not self._parked[replica]:
            fut: "asyncio.Future[None]" = asyncio.get_running_loop().create_future()
            self._waiters[replica].append(fut)
            try:
                await asyncio.wait_for(fut, deadline - time.monotonic())
            except asyncio.TimeoutError:
                raise UpstreamBusy(replica) from None
        return self.open(replica)  # clean: nothing awaits between the check and the open

    def park(self, ch: Channel) -> None:
        self._parked[ch.replica].append(ch)
        waiters = self._waiters[ch.replica]
        while waiters:
            fut = waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break

    def sweep(self, max_idle: float) -> int:
        """Ping channels that have been idle for long."""
        now, swept = time.monotonic(), 0
        for idle in self._parked.values():
            kept: List[Channel] = []
            while idle:
                ch = idle.popleft()  # leak: the first young channel ends the loop without being kept
                if now - ch.last_used < max_idle:
                    break
                ch.dead, swept = False, swept + 1
                kept.append(ch)
            idle.extend(kept)
        return swept


class Gateway:
    def __init__(self, pool: ReplicaPool, limit: int = 256) -> None:
        self.pool = pool
        self.limit = limit
        self._streams: Dict[str, StreamState] = {}

    @staticmethod
    def _payload(body: Dict[str, Any]) -> Dict[str, Any]:
        if "prompt" not in body:
            raise BadRequest("no prompt")
        return {"prompt": body["prompt"], "max_tokens": body.get("max_tokens", 128)}

    # -- unary ------------------------------------------------------------
    async def complete(self, replica: str, body: Dict[str, Any]) -> Optional[str]:
        ch = self.pool.open(replica)  # leak: a body without a prompt makes _payload raise before the try
        payload = self._payload(body)
        try:
            await ch.send(payload)
            return "".join([tok async for tok in ch.tokens()])
        except UpstreamReset:
            ch.dead = True
            return None
        finally:
            self.pool.park(ch)

    async def embed(self, replica: str, body: Dict[str, Any]) -> bool:
        payload = self._payload(body)
        ch = await self.pool.open_wait(replica, 2.0)  # clean: parked on reset, on cancel and after the send
        try:
            await ch.send(payload)
        except (UpstreamReset, asyncio.CancelledError) as exc:
            ch.dead = isinstance(exc, UpstreamReset)
            self.pool.park(ch)
            if ch.dead:
                return False
            raise
        self.pool.park(ch)
        return True

    async def complete_anywhere(self, body: Dict[str, Any], attempts: int = 3) -> str:
        payload = self._payload(body)
        for _ in range(attempts):
            ch = self.pool.open_any()  # leak: a reset goes round the loop with the channel not parked
            if ch is None:
                await asyncio.sleep(0.05)
                continue
            try:
                await ch.send(payload)
                text = "".join([tok async for tok in ch.tokens()])
            except UpstreamReset:
                ch.dead = True
                continue
            self.pool.park(ch)
            return text
        raise UpstreamBusy("any")

    async def race(self, first: str, second: str, body: Dict[str, Any]) -> Optional[str]:
        """Send the request to two replicas and take the quicker answer."""
        payload = self._payload(body)
        a = self.pool.open(first)  # clean: parked if the second open is refused, else by its own _answer
        try:
            b = self.pool.open(second)  # clean: its _answer parks it in the finally
        except UpstreamBusy:
            self.pool.park(a)
            return None
        tasks = [asyncio.create_task(self._answer(ch, payload)) for ch in (a, b)]
        await asyncio.sleep(0)
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for t in rest:
            t.cancel()
        return next(iter(done)).result()

    async def _answer(self, ch: Channel, payload: Dict[str, Any]) -> Optional[str]:
        try:
            await ch.send(payload)
            return "".join([tok async for tok in ch.tokens()])
        except UpstreamReset:
            ch.dead = True
            return None
        finally:
            self.pool.park(ch)

    # -- streams ------------------------------------------------------------
    async def start(self, rid: str, replica: str, body: Dict[str, Any]) -> StreamState:
        if rid in self._streams or len(self._streams) >= self.limit:
            raise BadRequest(rid)
        state = StreamState(rid)
        payload = self._payload(body)
        state.channel = self.pool.open(replica)  # clean: _pump parks on every way out, and stop covers a pump that never ran
        self._streams[rid] = state
        state.task = asyncio.create_task(self._pump(state, payload))
        return state

    async def _pump(self, state: StreamState, payload: Dict[str, Any]) -> None:
        assert state.channel is not None
        try:
            await state.channel.send(payload)
            async for tok in state.channel.tokens():
                state.chunks.append(tok)
        except UpstreamReset:
            log.warning("%s cut after %d chunks", state.request_id, len(state.chunks))
        finally:
            self._settle(state)

    def _settle(self, state: StreamState) -> None:
        ch, state.channel = state.channel, None
        if ch is not None:
            self.pool.park(ch)

    async def stop(self, rid: str) -> None:
        state = self._streams.pop(rid, None)
        if state is None:
            return
        if state.task is not None:
            state.task.cancel()
        self._settle(state)

    async def restart(self, rid: str, replica: str) -> bool:
        state = self._streams.get(rid)
        try:
            ch = await self.pool.open_wait(replica, 1.0)  # leak: an unknown id returns with the channel open
        except UpstreamBusy:
            return False
        if state is None:
            log.info("no stream %s", rid)
            return False
        self._settle(state)
        state.channel = ch
        return True

    # -- background -----------------------------------------------------------
    async def keepalive(self, replica: str) -> None:
        ch = self.pool.open_fresh(replica, 10_000)  # leak: the cancelled pinger returns before the park
        if ch is None:
            return
        try:
            while True:
                await ch.send({"ping": True})
                await asyncio.sleep(15.0)
        except asyncio.CancelledError:
            return
        except UpstreamReset:
            ch.dead = True
        self.pool.park(ch)
