"""Side streams and in-flight permits for overlapping copies and remote rollouts."""
from __future__ import annotations

import asyncio
from typing import Any, Awaitable, Callable, Dict, List, Optional, Set


class Stream:
    def __init__(self, sid: int) -> None:
        self.sid = sid
        self.ops = 0

    def run(self, n: int) -> int:
        self.ops += n
        return self.ops


class StreamPool:
    def __init__(self, n: int) -> None:
        self._idle: List[Stream] = [Stream(i) for i in range(n)]

    def obtain(self) -> Stream:
        return self._idle.pop()

    def restore(self, s: Stream) -> None:
        self._idle.append(s)


class InflightLimiter:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.current = 0

    def try_enter(self, n: int = 1) -> bool:
        if self.current + n > self.limit:
            return False
        self.current += n
        return True

    def leave(self, n: int = 1) -> None:
        self.current -= n


class CopyEngine:
    def __init__(self, streams: StreamPool) -> None:
        self.streams = streams
        self.h2d = streams.obtain()  # clean: held for the engine's life, close restores it
        self.d2h: Optional[Stream] = None
        self._callbacks: List[Callable[[], None]] = []

    def close(self) -> None:
        self.synchronize()
        self.streams.restore(self.h2d)
        if self.d2h is not None:
            self.streams.restore(self.d2h)
            self.d2h = None

    def copy_async(self, n: int) -> None:
        s = self.streams.obtain()  # clean: near miss, the callback restores it in synchronize
        s.run(n)
        self._callbacks.append(lambda: self.streams.restore(s))

    def synchronize(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for cb in callbacks:
            cb()

    def copy(self, n: int, stream: Optional[Stream] = None) -> int:
        own = stream is None
        s = self.streams.obtain() if own else stream  # clean: near miss, own decides and is tested at the end
        out = s.run(n)
        if own:
            self.streams.restore(s)
        return out

    def copy_chunks(self, chunks: List[int], stream: Optional[Stream] = None) -> int:
        own = False
        if stream is None:
            stream = self.streams.obtain()  # leak: own is never set, so it is not restored
        out = 0
        for n in chunks:
            out = stream.run(n)
        if own:
            self.streams.restore(stream)
        return out

    def enable_d2h(self) -> None:
        self.d2h = self.streams.obtain()  # leak: a second call overwrites the first stream

    def fan_out(self, sizes: List[int]) -> List[int]:
        streams = [self.streams.obtain() for _ in sizes]  # leak: those after the first zero size are not restored
        out = []
        for s, n in zip(streams, sizes):
            if n == 0:
                self.streams.restore(s)
                break
            out.append(s.run(n))
            self.streams.restore(s)
        return out


class RemoteRollout:
    def __init__(self, limiter: InflightLimiter, send: Callable[[str], Awaitable[Any]]) -> None:
        self.limiter = limiter
        self.send = send
        self.tasks: Set["asyncio.Task[Any]"] = set()
        self.cache: Dict[str, Any] = {}

    async def call(self, prompt: str) -> Optional[Any]:
        if not self.limiter.try_enter():  # leak: a cached prompt returns without leave
            return None
        if prompt in self.cache:
            return self.cache[prompt]
        try:
            self.cache[prompt] = await self.send(prompt)
            return self.cache[prompt]
        finally:
            self.limiter.leave()

    async def call_retry(self, prompt: str, tries: int = 3) -> Optional[Any]:
        for _ in range(tries):
            if not self.limiter.try_enter():  # leak: a timeout is retried without leave
                await asyncio.sleep(0)
                continue
            try:
                result = await self.send(prompt)
            except asyncio.TimeoutError:
                continue
            self.limiter.leave()
            return result
        return None

    async def call_backoff(self, prompt: str, tries: int = 3) -> Optional[Any]:
        for _ in range(tries):
            if not self.limiter.try_enter():  # clean: near miss, continue in except still runs finally
                await asyncio.sleep(0)
                continue
            try:
                return await self.send(prompt)
            except asyncio.TimeoutError:
                continue
            finally:
                self.limiter.leave()
        return None

    def spawn(self, prompt: str) -> bool:
        if not self.limiter.try_enter():  # clean: the done callback leaves
            return False
        task = asyncio.get_running_loop().create_task(self.send(prompt))
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return True

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self.tasks.discard(task)
        self.limiter.leave()

    async def group(self, prompts: List[str]) -> List[Any]:
        n = len(prompts)
        if not self.limiter.try_enter(n):  # leak: enters n, leaves one
            return []
        try:
            return [await self.send(p) for p in prompts]
        finally:
            self.limiter.leave()


async def _main() -> None:
    async def echo(p: str) -> str:
        return p

    lim = InflightLimiter(2)
    r = RemoteRollout(lim, echo)
    assert await r.call_backoff("x") == "x"
    r.spawn("y")
    await asyncio.gather(*r.tasks)
    await asyncio.sleep(0)
    assert lim.current == 0


if __name__ == "__main__":
    asyncio.run(_main())
    eng = CopyEngine(StreamPool(4))
    eng.copy(3)
    eng.copy_async(2)
    eng.close()
