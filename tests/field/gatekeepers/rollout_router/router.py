import asyncio
import logging
import time

from .engines import Engine, EngineSet

log = logging.getLogger("router")


class EngineError(RuntimeError):
    pass


class Router:
    def __init__(self, engines: EngineSet, client, retries: int = 3, hedge_after: float = 8.0):
        self.engines = engines
        self.client = client
        self.retries = retries
        self.hedge_after = hedge_after
        self._sessions = {}
        self.latencies = []

    async def _post(self, engine: Engine, prompt: str, params: dict) -> dict:
        t0 = time.monotonic()
        reply = await self.client.post(engine.url + "/generate", json={"prompt": prompt, **params})
        if reply.status != 200:
            raise EngineError(f"{engine.name}: {reply.status}")
        self.latencies.append(time.monotonic() - t0)
        return await reply.json()

    async def generate(self, prompt: str, params: dict) -> dict:
        with await self.engines.ticket() as t:  # clean: with statement
            return await self._post(t.engine, prompt, params)

    async def generate_fallback(self, prompt: str, params: dict) -> dict:
        last = None
        for _ in range(self.retries):
            t = await self.engines.ticket()  # leak: after an EngineError the next ticket is taken without done()
            try:
                out = await self._post(t.engine, prompt, params)
            except EngineError as e:
                log.warning("fallback: %s", e)
                last = e
                continue
            t.done()
            return out
        raise last

    async def _owned(self, t, prompt, params):
        try:
            return await self._post(t.engine, prompt, params)
        finally:
            t.done()

    async def hedged(self, prompt: str, params: dict) -> dict:
        t = await self.engines.ticket()  # clean: near miss, _owned calls done(), also when it is cancelled
        first = asyncio.create_task(self._owned(t, prompt, params))
        done, _ = await asyncio.wait({first}, timeout=self.hedge_after)
        if done:
            return first.result()
        t = self.engines.ticket_nowait()  # clean: near miss, the name is rebound but the first ticket is the task's, and this one will be too
        if t is None:
            return await first
        second = asyncio.create_task(self._owned(t, prompt, params))
        done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for p in pending:
            p.cancel()
        return done.pop().result()

    async def logprobs_if_free(self, prompt: str, limit: int):
        t = self.engines.ticket_nowait()  # leak: a prompt over the limit returns before the try
        if t is None:
            return None
        if len(prompt) > limit:
            return None
        try:
            return await self._post(t.engine, prompt, {"max_tokens": 0, "logprobs": True})
        finally:
            t.done()

    # Multi-turn sessions stay on the engine that has their prefix.

    async def turn(self, sid: str, prompt: str, params: dict) -> dict:
        t = self._sessions.get(sid)
        if t is None:
            t = await self.engines.ticket()  # leak: engine_lost() drops the session's ticket from the table without done()
            self._sessions[sid] = t
        return await self._post(t.engine, prompt, params)

    def end_session(self, sid: str) -> None:
        t = self._sessions.pop(sid, None)
        if t is not None:
            t.done()

    def engine_lost(self, name: str) -> None:
        engine = self.engines.set_health(name, False)
        self._sessions = {s: t for s, t in self._sessions.items() if t.engine is not engine}
        log.error("%s lost, %d sessions left", name, len(self._sessions))

    def close(self) -> None:
        for sid in list(self._sessions):
            self.end_session(sid)
