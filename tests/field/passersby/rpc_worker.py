"""asyncio worker RPC with credit-based flow control."""
import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, List, Optional

logger = logging.getLogger("rpc")


class CreditError(RuntimeError):
    pass


class Credits:
    def __init__(self, n: int) -> None:
        self.total = n
        self.left = n
        self._event = asyncio.Event()

    async def take_credit(self, n: int = 1) -> int:
        while self.left < n:
            self._event.clear()
            await self._event.wait()
        self.left -= n
        return n

    def try_take_credit(self, n: int = 1) -> bool:
        if self.left < n:
            return False
        self.left -= n
        return True

    def return_credit(self, n: int = 1) -> None:
        self.left += n
        self._event.set()


@dataclass
class Call:
    cid: int
    method: str
    args: List[Any]
    cost: int = 1
    result: Any = None
    future: Optional["asyncio.Future[Any]"] = None
    trace: Dict[str, float] = field(default_factory=dict)


class Worker:
    def __init__(self, credits: Credits, handlers: Dict[str, Callable[..., Awaitable[Any]]]) -> None:
        self.credits = credits
        self.handlers = handlers
        self.ids = itertools.count(1)
        self.inflight: Dict[int, Call] = {}
        self.lock = asyncio.Lock()
        self.closed = False

    async def call(self, method: str, *args: Any) -> Any:
        await self.credits.take_credit()  # leak: an unknown method returns None and keeps the credit
        handler = self.handlers.get(method)
        if handler is None:
            logger.error("no such method %r", method)
            return None
        try:
            return await handler(*args)
        finally:
            self.credits.return_credit()

    async def call_checked(self, method: str, *args: Any) -> Any:
        await self.credits.take_credit()  # clean: near miss, the raise is inside try
        try:
            if method not in self.handlers:
                raise LookupError(method)
            return await self.handlers[method](*args)
        finally:
            self.credits.return_credit()

    async def submit(self, method: str, *args: Any) -> int:
        if self.closed:
            raise CreditError("worker is closed")
        n = await self.credits.take_credit()  # clean: near miss, belongs to the call in inflight, complete() returns it
        cid = next(self.ids)
        self.inflight[cid] = Call(cid, method, list(args), cost=n)
        return cid

    def complete(self, cid: int, result: Any) -> None:
        c = self.inflight.pop(cid, None)
        if c is None:
            return
        c.result = result
        self.credits.return_credit(c.cost)

    async def submit_bulk(self, method: str, items: List[Any]) -> Optional[int]:
        if not self.credits.try_take_credit(len(items)):  # leak: the call is recorded with cost 1, the rest never comes back
            return None
        cid = next(self.ids)
        self.inflight[cid] = Call(cid, method, items)
        return cid

    async def submit_weighted(self, method: str, items: List[Any], weight: int) -> Optional[int]:
        if not self.credits.try_take_credit(weight):  # clean: near miss, the cost travels with the call
            return None
        cid = next(self.ids)
        self.inflight[cid] = Call(cid, method, items, cost=weight)
        return cid

    @contextlib.asynccontextmanager
    async def credit(self, n: int = 1) -> AsyncIterator[None]:
        await self.credits.take_credit(n)  # clean: returned in finally
        try:
            yield
        finally:
            self.credits.return_credit(n)

    async def gather(self, method: str, batches: List[Any]) -> List[Any]:
        async def one(b: Any) -> Any:
            async with self.credit():  # clean: with statement
                return await self.handlers[method](b)

        return await asyncio.gather(*(one(b) for b in batches))

    async def stream(self, method: str, chunks: AsyncIterator[bytes]) -> int:
        await self.credits.take_credit(2)  # leak: one of two credits comes back
        total = 0
        async for chunk in chunks:
            total += len(await self.handlers[method](chunk))
        self.credits.return_credit()
        return total

    async def swap_handler(self, method: str, fn: Callable[..., Awaitable[Any]]) -> bool:
        await self.lock.acquire()  # leak: the early return with calls in flight leaves the lock taken
        if self.inflight:
            return False
        self.handlers[method] = fn
        self.lock.release()
        return True

    async def remove_handler(self, method: str) -> bool:
        async with self.lock:  # clean: with statement
            if self.inflight:
                return False
            return self.handlers.pop(method, None) is not None

    async def heartbeat(self, peers: List[str]) -> List[str]:
        dead = []
        for peer in peers:
            if not self.credits.try_take_credit():  # leak: a timeout marks the peer dead, the handler forgets the credit
                break
            try:
                await asyncio.wait_for(self.handlers["ping"](peer), timeout=1.0)
                self.credits.return_credit()
            except asyncio.TimeoutError:
                dead.append(peer)
        return dead

    async def probe(self, peers: List[str]) -> Dict[str, bool]:
        alive: Dict[str, bool] = {}
        for peer in peers:
            await self.credits.take_credit()  # clean: near miss, finally runs on continue too
            try:
                if peer in alive:
                    continue
                alive[peer] = bool(await self.handlers["ping"](peer))
            finally:
                self.credits.return_credit()
        return alive

    def close(self) -> None:
        self.closed = True
        for cid in list(self.inflight):
            self.complete(cid, None)
