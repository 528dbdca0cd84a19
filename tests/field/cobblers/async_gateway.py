"""asyncio front end: admission permits, per-request stream channels, background tasks."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional, Set

logger = logging.getLogger("gateway")


class Overloaded(Exception):
    pass


class EngineError(Exception):
    pass


@dataclass(eq=False)
class Permit:
    weight: int
    issued: float = field(default_factory=time.monotonic)


class AdmissionController:
    """Token-weighted permits: a request may enter when its prompt fits in what is left."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._cond = asyncio.Condition()

    async def admit(self, weight: int, timeout: Optional[float] = None) -> Permit:
        async with self._cond:
            try:
                await asyncio.wait_for(self._cond.wait_for(lambda: self.used + weight <= self.capacity), timeout)
            except asyncio.TimeoutError:
                raise Overloaded(f"{self.used}/{self.capacity}") from None
            self.used += weight
            return Permit(weight)

    def admit_now(self, weight: int) -> Optional[Permit]:
        if self.used + weight > self.capacity:
            return None
        self.used += weight
        return Permit(weight)

    async def discharge(self, permit: Permit) -> None:
        async with self._cond:
            self.used -= permit.weight
            self._cond.notify_all()

    @contextlib.asynccontextmanager
    async def admitted(self, weight: int, timeout: Optional[float] = None) -> AsyncIterator[Permit]:
        permit = await self.admit(weight, timeout)  # clean: discharged in the finally
        try:
            yield permit
        finally:
            await self.discharge(permit)


@dataclass
class GenRequest:
    request_id: str
    prompt: List[int]
    max_tokens: int = 16
    permit: Optional[Permit] = None
    cancelled: bool = False


Engine = Callable[[GenRequest], Awaitable[List[int]]]


class Gateway:
    def __init__(self, engine: Engine, capacity: int) -> None:
        self.engine = engine
        self.admission = AdmissionController(capacity)
        self.live: Dict[str, GenRequest] = {}
        self._tasks: Set["asyncio.Task"] = set()
        self.rejected = 0

    async def complete(self, req: GenRequest) -> List[int]:
        async with self.admission.admitted(len(req.prompt), timeout=1.0):  # clean: async context manager
            return await self.engine(req)

    async def chat(self, req: GenRequest) -> Optional[List[int]]:
        permit = await self.admission.admit(len(req.prompt))  # leak: EngineError is caught and survived without discharge
        try:
            tokens = await self.engine(req)
            await self.admission.discharge(permit)
            return tokens
        except EngineError:
            logger.exception("engine failed for %s", req.request_id)
            return None

    async def embed(self, req: GenRequest) -> Optional[int]:
        permit = await self.admission.admit(len(req.prompt))  # clean: near miss, the finally covers the caught error too
        try:
            return sum(await self.engine(req))
        except EngineError:
            return None
        finally:
            await self.admission.discharge(permit)

    async def score(self, req: GenRequest, options: List[List[int]]) -> Optional[int]:
        """Index of the best option, None for overload."""
        base = self.admission.admit_now(len(req.prompt))  # leak: lost when the extra permit is refused
        if base is None:
            self.rejected += 1
            return None
        extra = self.admission.admit_now(sum(map(len, options)))  # clean: None-checked and discharged below
        if extra is None:
            self.rejected += 1
            return None
        try:
            scores = [sum(await self.engine(GenRequest(req.request_id, req.prompt + o))) for o in options]
        finally:
            await self.admission.discharge(extra)
            await self.admission.discharge(base)
        return max(range(len(scores)), key=scores.__getitem__)

    async def submit(self, req: GenRequest) -> str:
        """Fire and forget; the result is fetched with /status."""
        req.permit = await self.admission.admit(len(req.prompt))  # clean: near miss, the request owns it and _run discharges
        self.live[req.request_id] = req
        task = asyncio.create_task(self._run(req))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return req.request_id

    async def _run(self, req: GenRequest) -> None:
        try:
            await self.engine(req)
        except EngineError as exc:
            logger.warning("%s: %s", req.request_id, exc)
        finally:
            self.live.pop(req.request_id, None)
            if req.permit is not None:
                permit, req.permit = req.permit, None
                await self.admission.discharge(permit)

    async def submit_batch(self, reqs: List[GenRequest]) -> int:
        """All of the batch that fits at this moment, the rest is turned away."""
        started = 0
        for req in reqs:
            permit = self.admission.admit_now(len(req.prompt))  # leak: a request cancelled meanwhile is skipped with its permit
            if permit is None:
                self.rejected += 1
                continue
            if req.cancelled:
                continue
            req.permit = permit
            self.live[req.request_id] = req
            task = asyncio.create_task(self._run(req))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            started += 1
        return started

    async def stream(self, req: GenRequest) -> AsyncIterator[int]:
        permit = await self.admission.admit(len(req.prompt))  # leak: a consumer that stops early or a cancel flag ends the generator before discharge
        for tok in await self.engine(req):
            if req.cancelled:
                return
            yield tok
        await self.admission.discharge(permit)

    async def stream_guarded(self, req: GenRequest) -> AsyncIterator[int]:
        permit = await self.admission.admit(len(req.prompt))  # clean: near miss, the finally runs at aclose as well
        try:
            for tok in await self.engine(req):
                if req.cancelled:
                    return
                yield tok
        finally:
            await self.admission.discharge(permit)

    async def retrying(self, req: GenRequest, attempts: int = 3) -> Optional[List[int]]:
        for n in range(attempts):
            permit = await self.admission.admit(len(req.prompt))  # leak: each failed attempt takes another permit
            try:
                out = await self.engine(req)
            except EngineError:
                await asyncio.sleep(0.001 * n)
                continue
            await self.admission.discharge(permit)
            return out
        return None

    async def retrying_held(self, req: GenRequest, attempts: int = 3) -> Optional[List[int]]:
        permit = await self.admission.admit(len(req.prompt))  # clean: near miss, one permit for all attempts
        out: Optional[List[int]] = None
        for n in range(attempts):
            try:
                out = await self.engine(req)
                break
            except EngineError:
                await asyncio.sleep(0.001 * n)
        await self.admission.discharge(permit)
        return out

    async def abort(self, request_id: str) -> bool:
        req = self.live.get(request_id)
        if req is None:
            return False
        req.cancelled = True
        return True

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))


class WarmSlots:
    """Keeps a permit per model for requests that must not queue (health checks, canaries)."""

    def __init__(self, admission: AdmissionController) -> None:
        self.admission = admission
        self._held: Dict[str, Permit] = {}

    async def reserve(self, model: str) -> None:
        if model in self._held:
            return
        permit = self.admission.admit_now(1)  # clean: None-checked and kept, drop() and close() discharge it
        if permit is None:
            raise Overloaded(model)
        self._held[model] = permit

    async def resize(self, model: str, weight: int) -> None:
        if weight == 0:
            await self.drop(model)
            return
        wider = self.admission.admit_now(weight)  # clean: near miss, the replaced permit is discharged
        if wider is None:
            return
        old = self._held.get(model)
        self._held[model] = wider
        if old is not None:
            await self.admission.discharge(old)

    async def drop(self, model: str) -> None:
        permit = self._held.pop(model, None)
        if permit is not None:
            await self.admission.discharge(permit)

    async def close(self) -> None:
        for model in list(self._held):
            await self.drop(model)


class ModelLock:
    """Serialises weight updates with generation."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.version = 0

    async def update(self, version: int) -> bool:
        await self._lock.acquire()  # leak: a stale version returns with the lock held
        if version <= self.version:
            return False
        self.version = version
        self._lock.release()
        return True
