"""Elastic coordinator: node leases, per-job ports and rate limits, all on one asyncio loop."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional, Set

log = logging.getLogger("elastic")


@dataclass(frozen=True)
class NodeLease:
    host: str
    gpus: int
    since: float


class NodeRegistry:
    def __init__(self, hosts: Dict[str, int]) -> None:
        self._idle = dict(hosts)
        self._taken: Dict[str, NodeLease] = {}
        self._changed = asyncio.Condition()

    async def obtain(self, gpus: int, timeout: float) -> Optional[NodeLease]:
        deadline = time.monotonic() + timeout
        async with self._changed:
            while True:
                host = next((h for h, g in self._idle.items() if g >= gpus), None)
                if host is not None:
                    lease = NodeLease(host, self._idle.pop(host), time.time())
                    self._taken[host] = lease
                    return lease
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)

    async def surrender(self, lease: NodeLease) -> None:
        async with self._changed:
            del self._taken[lease.host]
            self._idle[lease.host] = lease.gpus
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def borrowed(self, gpus: int) -> AsyncIterator[Optional[NodeLease]]:
        lease = await self.obtain(gpus, 30.0)  # clean: surrendered in finally if there is one
        try:
            yield lease
        finally:
            if lease is not None:
                await self.surrender(lease)


class PortRange:
    """Rendezvous ports."""

    def __init__(self, first: int, n: int) -> None:
        self._ports: Set[int] = set(range(first, first + n))

    def pick(self) -> int:
        return self._ports.pop()

    def drop(self, port: int) -> None:
        self._ports.add(port)


class Gate:
    """At most n concurrent health probes."""

    def __init__(self, n: int) -> None:
        self._sem = asyncio.Semaphore(n)

    async def __aenter__(self) -> "Gate":
        await self.wait_turn()  # clean: near miss, __aexit__ ends the turn
        return self

    async def __aexit__(self, *exc) -> None:
        self.end_turn()

    async def wait_turn(self) -> None:
        await self._sem.acquire()  # clean: near miss, end_turn() is the other half

    def end_turn(self) -> None:
        self._sem.release()


@dataclass
class Job:
    name: str
    want: int
    gpus: int
    nodes: List[NodeLease] = field(default_factory=list)
    port: Optional[int] = None
    debug_port: Optional[int] = None
    task: Optional["asyncio.Task[int]"] = None
    restarts: int = 0


Launcher = Callable[[Job], Awaitable[int]]
Probe = Callable[[str], Awaitable[bool]]


class Coordinator:
    def __init__(self, nodes: NodeRegistry, ports: PortRange, gate: Gate, launch: Launcher, probe: Probe):
        self.nodes = nodes
        self.ports = ports
        self.gate = gate
        self.launch = launch
        self.probe = probe
        self.jobs: Dict[str, Job] = {}
        self.spares: List[NodeLease] = []

    # ---- life of a job --------------------------------------------------------------------

    async def submit(self, name: str, want: int, gpus: int, debug: bool = False) -> Optional[Job]:
        job = Job(name, want, gpus)
        for _ in range(want):
            lease = await self.nodes.obtain(gpus, 60.0)  # clean: near miss, rolled back or finish()ed
            if lease is None:
                for got in job.nodes:
                    await self.nodes.surrender(got)
                return None
            job.nodes.append(lease)
        job.port = self.ports.pick()  # clean: near miss, finish() drops it
        if debug:
            job.debug_port = self.ports.pick()  # leak: finish() drops the rendezvous port only
        self.jobs[name] = job
        job.task = asyncio.create_task(self._run(job))
        return job

    async def _run(self, job: Job) -> int:
        code = await self.launch(job)
        while code != 0 and job.restarts < 3:
            job.restarts += 1
            await self.replace_dead(job)
            code = await self.launch(job)
        await self.finish(job)
        return code

    async def finish(self, job: Job) -> None:
        self.jobs.pop(job.name, None)
        for lease in job.nodes:
            await self.nodes.surrender(lease)
        job.nodes = []
        if job.port is not None:
            self.ports.drop(job.port)
            job.port = None
        job.debug_port = None

    async def replace_dead(self, job: Job) -> int:
        """Swap nodes that do not answer for new ones."""
        replaced = 0
        for i, lease in enumerate(job.nodes):
            async with self.gate:
                alive = await self.probe(lease.host)
            if alive:
                continue
            fresh = await self.nodes.obtain(job.gpus, 10.0)  # clean: near miss, takes the place of the dead
            if fresh is None:
                break
            job.nodes[i] = fresh
            await self.nodes.surrender(lease)
            replaced += 1
        return replaced

    async def migrate(self, job: Job) -> bool:
        """Move the whole job to other nodes."""
        fresh: List[NodeLease] = []
        for _ in job.nodes:
            lease = await self.nodes.obtain(job.gpus, 5.0)  # leak: those gathered before a time-out are lost
            if lease is None:
                log.warning("cannot migrate %s", job.name)
                return False
            fresh.append(lease)
        old, job.nodes = job.nodes, fresh
        for lease in old:
            await self.nodes.surrender(lease)
        return True

    # ---- spares ---------------------------------------------------------------------------

    async def hold_spares(self, n: int, gpus: int) -> int:
        while len(self.spares) < n:
            lease = await self.nodes.obtain(gpus, 1.0)  # clean: near miss, let_go() surrenders
            if lease is None:
                break
            self.spares.append(lease)
        return len(self.spares)

    async def take_spare(self, gpus: int) -> Optional[NodeLease]:
        for i, lease in enumerate(self.spares):
            if lease.gpus >= gpus:
                return self.spares.pop(i)
        return await self.nodes.obtain(gpus, 5.0)  # clean: handed to the caller

    async def let_go(self) -> None:
        while self.spares:
            await self.nodes.surrender(self.spares.pop())

    async def patch(self, job: Job, host: str) -> bool:
        spare = await self.take_spare(job.gpus)  # leak: an unknown host returns without surrendering
        if spare is None:
            return False
        for i, lease in enumerate(job.nodes):
            if lease.host == host:
                job.nodes[i] = spare
                await self.nodes.surrender(lease)
                return True
        log.error("%s is not a node of %s", host, job.name)
        return False

    # ---- health ---------------------------------------------------------------------------

    async def sweep(self, hosts: List[str]) -> List[str]:
        bad: List[str] = []
        for host in hosts:
            await self.gate.wait_turn()  # leak: a healthy host continues without ending the turn
            if await self.probe(host):
                continue
            bad.append(host)
            self.gate.end_turn()
        return bad

    async def sweep_parallel(self, hosts: List[str]) -> List[str]:
        async def one(host: str) -> Optional[str]:
            async with self.gate:
                if await self.probe(host):
                    return None
                return host

        results = await asyncio.gather(*(one(h) for h in hosts))
        return [h for h in results if h is not None]

    async def burn_in(self, gpus: int, minutes: int) -> Dict[str, bool]:
        """Test one node for some time; another one if the first fails at once."""
        report: Dict[str, bool] = {}
        lease = await self.nodes.obtain(gpus, 5.0)  # leak: a failed first node is rebound by the second
        if lease is None:
            return report
        report[lease.host] = await self.probe(lease.host)
        if not report[lease.host]:
            lease = await self.nodes.obtain(gpus, 5.0)  # clean: None-checked, surrendered at the end
            if lease is None:
                return report
        for _ in range(minutes):
            report[lease.host] = await self.probe(lease.host)
            await asyncio.sleep(60)
        await self.nodes.surrender(lease)
        return report

    async def one_shot(self, gpus: int, work: Callable[[str], Awaitable[int]]) -> int:
        async with self.nodes.borrowed(gpus) as lease:  # clean: surrendered by the manager
            if lease is None:
                return -1
            return await work(lease.host)

    async def background(self, gpus: int, work: Callable[[str], Awaitable[int]]) -> Optional[asyncio.Task]:
        lease = await self.nodes.obtain(gpus, 5.0)  # clean: near miss, body() surrenders it
        if lease is None:
            return None

        async def body() -> int:
            try:
                return await work(lease.host)
            finally:
                await self.nodes.surrender(lease)

        return asyncio.create_task(body())

    async def tunnel(self, work: Callable[[int], Awaitable[bool]]) -> bool:
        """Retry on another port until it works."""
        for _ in range(5):
            port = self.ports.pick()  # leak: the port that worked is not dropped on return
            if await work(port):
                return True
            self.ports.drop(port)
        return False
