"""Leases of whole GPUs, and the job runner that lives from them."""
from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shlex
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Iterable

logger = logging.getLogger("broker")

_serial = itertools.count(1)


class NoCapacity(Exception):
    """Not enough GPUs became free in time."""


class RestoreFailed(Exception):
    """A checkpoint could not be loaded on the new devices."""


@dataclass(eq=False)
class Lease:
    owner: str
    devices: tuple[int, ...]
    serial: int = field(default_factory=lambda: next(_serial))

    def environ(self) -> dict[str, str]:
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices))}


@dataclass(eq=False)
class Broker:
    islands: dict[int, int]
    name: str = "local"
    _free: list[int] = field(default_factory=list)
    _live: dict[int, Lease] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self._free.extend(sorted(self.islands))

    async def lease(self, want: int, owner: str, patience: float | None = None) -> Lease:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: len(self._free) >= want), patience)
            except asyncio.TimeoutError:
                raise NoCapacity(f"{self.name}: {want} for {owner}") from None
            got = Lease(owner, tuple(self._free.pop() for _ in range(want)))  # clean: recorded in _live and returned
            self._live[got.serial] = got
            return got

    async def lease_linked(self, want: int, owner: str) -> Lease | None:
        """Only devices of one NVLink island; None when there are not enough."""
        async with self._changed:
            picked = self._pick_island(want)  # clean: None or put into the lease below
            if picked is None:
                return None
            got = Lease(owner, tuple(picked))
            self._live[got.serial] = got
            return got

    def _pick_island(self, want: int) -> list[int] | None:
        picked: list[int] = []
        skipped: list[int] = []
        while self._free and len(picked) < want:
            gpu = self._free.pop()  # leak: when the search fails only picked goes back, the skipped ones of other islands do not
            if picked and self.islands[gpu] != self.islands[picked[0]]:
                skipped.append(gpu)
                continue
            picked.append(gpu)
        if len(picked) < want:
            self._free.extend(picked)
            return None
        self._free.extend(skipped)
        return picked

    async def release(self, lease: Lease) -> None:
        async with self._changed:
            if self._live.pop(lease.serial, None) is None:
                return
            self._free.extend(lease.devices)
            self._changed.notify_all()

    @asynccontextmanager
    async def leased(self, want: int, owner: str):
        lease = await self.lease(want, owner)  # clean: the finally
        try:
            yield lease
        finally:
            await self.release(lease)


@dataclass(eq=False)
class Job:
    name: str
    argv: list[str]
    gpus: int = 1
    cancelled: bool = False
    lease: Lease | None = None
    log_tail: list[str] = field(default_factory=list)


class Trial:
    """A training job with a smaller evaluation job at its side."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self.name = name
        self.train: Lease | None = None
        self.judge: Lease | None = None

    async def start(self, gpus: int) -> None:
        self.train = await self.broker.lease(gpus, f"{self.name}/train")  # clean: near miss, kept on the trial and released by close
        if gpus >= 4:
            self.judge = await self.broker.lease(1, f"{self.name}/judge")  # leak: close() releases the train lease only

    async def evaluate(self, checkpoint: str) -> int:
        lease = self.judge or self.train
        assert lease is not None
        return await _spawn([sys.executable, "-m", "judge", checkpoint], lease)

    async def close(self) -> None:
        if self.train is not None:
            await self.broker.release(self.train)
            self.train = None


async def _spawn(argv: Iterable[str], lease: Lease) -> int:
    argv = list(argv)
    logger.info("%s: %s", lease.owner, shlex.join(argv))
    proc = await asyncio.create_subprocess_exec(*argv, env=lease.environ())  # clean: waited for, or killed by the finally when the task is cancelled
    try:
        return await proc.wait()
    finally:
        if proc.returncode is None:
            proc.kill()
            await proc.wait()


class Runner:
    def __init__(self, broker: Broker, on_exit: Callable[[Job, int], Awaitable[None]]) -> None:
        self.broker = broker
        self.on_exit = on_exit
        self.tasks: dict[str, asyncio.Task[int]] = {}
        self.parked: dict[str, Lease] = {}

    async def run_once(self, job: Job) -> int:
        """Foreground; used by the command line."""
        async with self.broker.leased(job.gpus, job.name) as lease:  # clean: async with
            return await _spawn(job.argv, lease)

    async def submit(self, job: Job) -> bool:
        lease = await self.broker.lease(job.gpus, job.name)  # leak: _reaped returns before the release when the task was cancelled
        job.lease = lease
        task = asyncio.create_task(_spawn(job.argv, lease), name=job.name)
        self.tasks[job.name] = task
        task.add_done_callback(lambda t: asyncio.ensure_future(self._reaped(job, t)))
        return True

    async def _reaped(self, job: Job, task: asyncio.Task[int]) -> None:
        self.tasks.pop(job.name, None)
        if task.cancelled():
            logger.info("%s was cancelled", job.name)
            return
        code = -1 if task.exception() else task.result()
        await self.on_exit(job, code)
        held, job.lease = job.lease, None
        if held is not None:
            await self.broker.release(held)

    def cancel(self, name: str) -> None:
        task = self.tasks.get(name)
        if task is not None:
            task.cancel()

    async def submit_when_free(self, job: Job, patience: float) -> bool:
        """Like submit for jobs of the night queue, they can be withdrawn while they wait."""
        try:
            lease = await self.broker.lease(job.gpus, job.name, patience)  # leak: a job withdrawn during the wait returns with the lease
        except NoCapacity:
            logger.info("%s: no capacity, stays queued", job.name)
            return False
        if job.cancelled:
            logger.info("%s: withdrawn while it waited", job.name)
            return False
        job.lease = lease
        try:
            code = await _spawn(job.argv, lease)
        finally:
            held, job.lease = job.lease, None  # migrate may have exchanged it
            await self.broker.release(held or lease)
        await self.on_exit(job, code)
        return True

    async def submit_gang(self, brokers: list[Broker], job: Job) -> list[int]:
        """The same command on several nodes at once, all or nothing."""
        leases: list[tuple[Broker, Lease]] = []
        try:
            for node in brokers:
                leases.append((node, await node.lease(job.gpus, job.name, 60.0)))  # clean: near miss, those taken before a NoCapacity are released by the finally
            return await asyncio.gather(*(_spawn(job.argv, lease) for _, lease in leases))
        finally:
            for node, lease in reversed(leases):
                await node.release(lease)

    async def migrate(self, job: Job, restore: Callable[[Job, Lease], Awaitable[None]]) -> bool:
        """Move a paused job to linked devices, when there are some."""
        target = await self.broker.lease_linked(job.gpus, job.name)  # leak: as the new lease of a submitted job it is forgotten by _reaped when the task is cancelled later
        if target is None:
            return False
        try:
            await restore(job, target)
        except RestoreFailed as exc:
            logger.warning("%s: %s", job.name, exc)
            await self.broker.release(target)
            return False
        if job.lease is None:
            logger.info("%s: over before the move was", job.name)
            await self.broker.release(target)
            return False
        old, job.lease = job.lease, target
        await self.broker.release(old)
        return True

    async def park(self, name: str, gpus: int) -> None:
        """Hold devices for somebody who comes back in a minute."""
        self.parked[name] = await self.broker.lease(gpus, f"parked/{name}")  # leak: a second park under the name overwrites the first lease

    async def unpark(self, name: str) -> None:
        lease = self.parked.pop(name, None)
        if lease is not None:
            await self.broker.release(lease)

    async def sweep(self, name: str, points: list[list[str]]) -> list[int]:
        """Run a list of commands one after another on one device."""
        lease = None
        codes = []
        try:
            for argv in points:
                if lease is None:
                    lease = await self.broker.lease(1, f"sweep/{name}")  # clean: near miss, kept over the loop on purpose, released in the finally
                codes.append(await _spawn(argv, lease))
        finally:
            if lease is not None:
                await self.broker.release(lease)
        return codes

    async def shutdown(self) -> None:
        for name in list(self.parked):
            await self.unpark(name)
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
