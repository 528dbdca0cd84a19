"""Cron of a replicated service: leadership terms, run tokens per job and watch subscriptions."""
from __future__ import annotations

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

log = logging.getLogger("cron")


@dataclass(frozen=True)
class Term:
    role: str
    epoch: int


class Coordinator:
    """Roles are held for a term. campaign wins or loses, resign ends the term."""

    def __init__(self) -> None:
        self._holders: dict[str, int] = {}
        self._epochs = itertools.count(1)

    async def campaign(self, role: str) -> Term | None:
        await asyncio.sleep(0)
        if role in self._holders:
            return None
        term = Term(role, next(self._epochs))
        self._holders[role] = term.epoch
        return term

    async def resign(self, term: Term) -> None:
        if self._holders.get(term.role) == term.epoch:
            del self._holders[term.role]


class TokenBin:
    """A run token stands for one running job; the bin has as many as the node may run."""

    def __init__(self, n: int) -> None:
        self._tokens = list(range(n))

    def draw(self) -> int | None:
        return self._tokens.pop() if self._tokens else None

    def toss(self, token: int) -> None:
        self._tokens.append(token)


@dataclass(eq=False)
class Watch:
    key: str
    fn: Callable[[str], None]


class WatchList:
    def __init__(self) -> None:
        self._watches: list[Watch] = []

    def watch(self, key: str, fn: Callable[[str], None]) -> Watch:
        w = Watch(key, fn)
        self._watches.append(w)
        return w

    def unwatch(self, w: Watch) -> None:
        self._watches.remove(w)

    def fire(self, key: str, value: str) -> None:
        for w in list(self._watches):
            if w.key == key:
                w.fn(value)


@dataclass
class Entry:
    name: str
    every: float
    fn: Callable[[], Awaitable[None]]
    next_run: float = 0.0
    token: int | None = None
    runs: int = 0


class Runner(ABC):
    def __init__(self, bin_: TokenBin) -> None:
        self.bin = bin_
        self.results: dict[str, float] = {}

    @abstractmethod
    async def launch(self, entry: Entry) -> bool: ...


class InlineRunner(Runner):
    async def launch(self, entry: Entry) -> bool:
        token = self.bin.draw()  # clean: tossed in the finally
        if token is None:
            return False
        started = time.monotonic()
        try:
            await entry.fn()
        finally:
            self.bin.toss(token)
        self.results[entry.name] = time.monotonic() - started
        return True


class TaskRunner(Runner):
    """The token stays in the entry while its task runs; the done callback tosses it."""

    async def launch(self, entry: Entry) -> bool:
        if entry.token is not None:
            return False
        entry.token = self.bin.draw()  # clean: near miss, tossed by the done callback
        if entry.token is None:
            return False
        task = asyncio.ensure_future(entry.fn())
        task.add_done_callback(lambda _t: self._done(entry))
        return True

    def _done(self, entry: Entry) -> None:
        token, entry.token = entry.token, None
        if token is not None:
            self.bin.toss(token)
        entry.runs += 1


class ShellRunner(Runner):
    """Runs a command line; poll is called by the loop until the process has ended."""

    def __init__(self, bin_: TokenBin) -> None:
        super().__init__(bin_)
        self.live: dict[str, tuple[int, asyncio.subprocess.Process]] = {}

    async def launch(self, entry: Entry) -> bool:
        token = self.bin.draw()  # leak: poll forgets the token of a process that ended with an error
        if token is None:
            return False
        proc = await asyncio.create_subprocess_exec("cron-job", entry.name)
        self.live[entry.name] = (token, proc)
        return True

    def poll(self) -> list[str]:
        ended = []
        for name in list(self.live):
            token, proc = self.live[name]
            if proc.returncode is None:
                continue
            del self.live[name]
            if proc.returncode != 0:
                log.error("%s ended with %d", name, proc.returncode)
                continue
            self.bin.toss(token)
            ended.append(name)
        return ended


class Scheduler:
    def __init__(self, coord: Coordinator, runner: Runner, watches: WatchList) -> None:
        self.coord = coord
        self.runner = runner
        self.watches = watches
        self.entries: dict[str, Entry] = {}
        self.term: Term | None = None
        self.paused = False
        self._config: Watch | None = None
        self._alarms: dict[str, Watch] = {}

    async def start(self) -> bool:
        if self.term is not None:
            return True
        self.term = await self.coord.campaign("cron")  # clean: resigned by stop
        if self.term is None:
            return False
        self._config = self.watches.watch("cron/paused", self._on_paused)  # leak: stop does not end the watch
        return True

    def _on_paused(self, value: str) -> None:
        self.paused = value == "1"

    async def stop(self) -> None:
        for name in list(self._alarms):
            self.silence(name)
        if self.term is not None:
            await self.coord.resign(self.term)
            self.term = None

    def alarm(self, name: str, fn: Callable[[str], None]) -> None:
        self.silence(name)
        self._alarms[name] = self.watches.watch(f"cron/late/{name}", fn)  # clean: ended by silence or stop

    def silence(self, name: str) -> None:
        old = self._alarms.pop(name, None)
        if old is not None:
            self.watches.unwatch(old)

    async def tick(self, now: float) -> int:
        launched = 0
        for entry in self.entries.values():
            if self.paused or entry.next_run > now:
                continue
            if await self.runner.launch(entry):
                entry.next_run = now + entry.every
                launched += 1
        return launched

    async def run_now(self, name: str) -> bool:
        """Operator command. Takes the job's own role, whoever leads."""
        term = await self.coord.campaign(f"job/{name}")  # leak: an unknown name returns without resigning
        if term is None:
            return False
        entry = self.entries.get(name)
        if entry is None:
            log.warning("no such job: %s", name)
            return False
        await entry.fn()
        entry.runs += 1
        await self.coord.resign(term)
        return True

    async def remove(self, name: str) -> bool:
        term = await self.coord.campaign(f"job/{name}")  # clean: resigned in the finally
        if term is None:
            return False
        try:
            if name not in self.entries:
                return False
            del self.entries[name]
            return True
        finally:
            await self.coord.resign(term)

    async def wait_value(self, key: str, timeout: float) -> str | None:
        got: asyncio.Future = asyncio.get_running_loop().create_future()
        w = self.watches.watch(key, got.set_result)  # clean: ended whether or not the value came
        done, _ = await asyncio.wait({got}, timeout=timeout)
        self.watches.unwatch(w)
        return got.result() if done else None

    async def wait_any(self, keys: list[str], timeout: float) -> str | None:
        got: asyncio.Queue = asyncio.Queue()
        watches = [self.watches.watch(k, got.put_nowait) for k in keys]  # leak: not ended after the timeout
        deadline = time.monotonic() + timeout
        while got.empty():
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.05)
        for w in watches:
            self.watches.unwatch(w)
        return await got.get()


async def lead(coord: Coordinator, role: str, body: Callable[[Term], Awaitable[bool]]) -> int:
    """Campaigns for ever; the body says whether it wants another term."""
    terms = 0
    while True:
        term = await coord.campaign(role)  # clean: resigned after each body
        if term is None:
            await asyncio.sleep(1.0)
            continue
        again = await body(term)
        terms += 1
        await coord.resign(term)
        if not again:
            return terms


async def handover(coord: Coordinator, role: str, stand_in: str) -> Term | None:
    """Wins the stand-in role first, then the real one; returns the latter."""
    spare = await coord.campaign(stand_in)  # leak: resigned only if the real role was lost
    if spare is None:
        return None
    term = await coord.campaign(role)  # clean: handed to the caller
    if term is None:
        await coord.resign(spare)
        return None
    log.info("%s taken over in epoch %d", role, term.epoch)
    return term


async def elect_once(coord: Coordinator, role: str, stand_in: str, work: Callable[[], None]) -> bool:
    term = await handover(coord, role, stand_in)  # clean: resigned after the work
    if term is None:
        return False
    work()
    await coord.resign(term)
    return True
