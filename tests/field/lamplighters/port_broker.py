"""Rendezvous ports for elastic training jobs that share a host."""
import asyncio
import logging
import socket
from typing import Dict, Optional, Set, Tuple

log = logging.getLogger("elastic.ports")


class PortsGone(Exception):
    pass


class LaunchFailed(Exception):
    pass


def is_bindable(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) != 0


class PortBroker:
    def __init__(self, low: int, high: int) -> None:
        self._free: Set[int] = set(range(low, high))
        self._foreign: Set[int] = set()

    def claim(self) -> int:
        """A port that nothing listens on."""
        while self._free:
            port = self._free.pop()  # clean: returned, or remembered as foreign until recheck
            if is_bindable(port):
                return port
            self._foreign.add(port)
        raise PortsGone()

    def recheck(self) -> None:
        for port in [p for p in self._foreign if is_bindable(p)]:
            self._foreign.discard(port)
            self._free.add(port)

    def claim_even(self) -> Optional[int]:
        """RTP-style even port; tries four."""
        for _ in range(4):
            if not self._free:
                return None
            port = self._free.pop()  # leak: the odd ports that were tried are not added again
            if port % 2 == 0:
                return port
        return None

    def yield_back(self, port: int) -> None:
        self._free.add(port)


class Launcher:
    def __init__(self, broker: PortBroker) -> None:
        self.broker = broker
        self._jobs: Dict[str, Tuple[int, int]] = {}

    async def _spawn(self, job: str, port: int) -> None:
        proc = await asyncio.create_subprocess_exec("torchrun", f"--rdzv-endpoint=localhost:{port}", job)
        if await proc.wait() != 0:
            raise LaunchFailed(job)

    async def run(self, job: str) -> bool:
        port = self.broker.claim()  # clean: finally
        try:
            await self._spawn(job, port)
            return True
        except LaunchFailed:
            return False
        finally:
            self.broker.yield_back(port)

    async def run_retrying(self, job: str, tries: int) -> bool:
        for _ in range(tries):
            port = self.broker.claim()  # leak: a failed launch claims the next port and forgets this one
            try:
                await asyncio.wait_for(self._spawn(job, port), 3600)
            except (LaunchFailed, asyncio.TimeoutError) as exc:
                log.warning("%s on %d: %r", job, port, exc)
                continue
            self.broker.yield_back(port)
            return True
        return False

    def register(self, job: str) -> Tuple[int, int]:
        """Master and metrics port, for as long as the job is registered."""
        if job in self._jobs:
            return self._jobs[job]
        master = self.broker.claim()  # clean: yielded back when the second claim fails
        try:
            metrics = self.broker.claim()  # clean: stored with the master port
        except PortsGone:
            self.broker.yield_back(master)
            raise
        self._jobs[job] = (master, metrics)
        return master, metrics

    def unregister(self, job: str) -> None:
        for port in self._jobs.pop(job, ()):
            self.broker.yield_back(port)
