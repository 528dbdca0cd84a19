"""Elastic trainer control: rank slots, a host-memory quota and port leases for restarted workers."""
import asyncio
import dataclasses
import logging
import time

log = logging.getLogger("elastic")


class RankSlots:
    def __init__(self, world: int):
        self._vacant = set(range(world))
        self._owner: dict = {}

    def assign(self, node: str):
        """Lowest vacant rank or None."""
        if not self._vacant:
            return None
        rank = min(self._vacant)
        self._vacant.discard(rank)
        self._owner[rank] = node
        return rank

    def vacate(self, rank: int) -> None:
        self._owner.pop(rank, None)
        self._vacant.add(rank)

    def vacate_node(self, node: str) -> int:
        gone = [r for r, n in self._owner.items() if n == node]
        for r in gone:
            self.vacate(r)
        return len(gone)


class PortRange:
    def __init__(self, lo: int, hi: int):
        self._ports = list(range(lo, hi))

    def allocate(self) -> int:
        """0 when there is none."""
        return self._ports.pop() if self._ports else 0

    def deallocate(self, port: int) -> None:
        self._ports.append(port)


class Quota:
    def __init__(self, gib: int):
        self._sem = asyncio.Semaphore(gib)

    async def charge(self) -> "Charge":
        await self._sem.acquire()  # clean: near miss, moved into the Charge whose uncharge releases it
        return Charge(self)

    def uncharge(self) -> None:
        self._sem.release()


class Charge:
    def __init__(self, quota: Quota):
        self.quota = quota

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        self.quota.uncharge()


@dataclasses.dataclass
class Worker:
    node: str
    rank: int
    port: int = 0
    charge: Charge = None
    beat: float = dataclasses.field(default_factory=time.monotonic)


class Supervisor:
    def __init__(self, slots: RankSlots, ports: PortRange, quota: Quota, launch):
        self.slots = slots
        self.ports = ports
        self.quota = quota
        self.launch = launch
        self.workers: dict = {}
        self.standby: dict = {}
        self.reserved: dict = {}

    async def start(self, node: str) -> bool:
        rank = self.slots.assign(node)  # clean: vacated without a port, else kept by the worker for stop
        if rank is None:
            return False
        port = self.ports.allocate()  # clean: kept by the worker, stop deallocates it
        if port == 0:
            self.slots.vacate(rank)
            return False
        charge = await self.quota.charge()  # clean: kept by the worker, stop uncharges it
        self.workers[rank] = Worker(node, rank, port, charge)
        await self.launch(node, rank, port)
        return True

    async def stop(self, rank: int) -> None:
        w = self.workers.pop(rank)
        self.ports.deallocate(w.port)
        w.charge.quota.uncharge()
        self.slots.vacate(rank)

    def add_standby(self, node: str) -> bool:
        """Spare with a port of its own, without a rank."""
        port = self.ports.allocate()  # leak: drop_standby deletes the entry and the port with it
        if port == 0:
            return False
        self.drop_standby(node)
        self.standby[node] = port
        return True

    def drop_standby(self, node: str) -> None:
        if node in self.standby:
            log.info("standby %s dropped", node)
            del self.standby[node]

    def reserve(self, node: str, n: int) -> bool:
        """Hold n ranks for a node that is about to join."""
        for _ in range(n):
            rank = self.slots.assign(node)  # clean: near miss, vacate_node gives back all ranks of the node
            if rank is None:
                self.slots.vacate_node(node)
                return False
            self.reserved.setdefault(node, []).append(rank)
        return True

    def unreserve(self, node: str) -> int:
        self.reserved.pop(node, None)
        return self.slots.vacate_node(node)

    async def reap(self, ttl: float) -> int:
        now = time.monotonic()
        dead = [r for r, w in self.workers.items() if now - w.beat > ttl]
        for rank in dead:
            await self.stop(rank)
        return len(dead)

    async def restart(self, rank: int, node: str) -> bool:
        if rank not in self.workers:
            return False
        await self.stop(rank)
        return await self.start(node)

    async def move_port(self, rank: int) -> bool:
        port = self.ports.allocate()  # clean: near miss, replaces the worker's port, which is deallocated
        if port == 0:
            return False
        w = self.workers[rank]
        w.port, old = port, w.port
        self.ports.deallocate(old)
        await self.launch(w.node, rank, w.port)
        return True

    async def probe_node(self, node: str, ping) -> bool:
        port = self.ports.allocate()  # leak: deallocated only when the ping came back
        if port == 0:
            return False
        ok = await ping(node, port)
        if ok:
            self.ports.deallocate(port)
        return ok

    async def with_retry(self, node: str, ping, tries: int) -> int:
        """Port on which the node answers, or 0; the caller deallocates it."""
        for i in range(tries):
            port = self.ports.allocate()  # leak: a port without an answer is replaced by the next try's
            if port == 0:
                await asyncio.sleep(0.1)
                continue
            if await ping(node, port):
                return port
            log.info("try %d: no answer from %s", i, node)
        return 0

    async def handshake(self, node: str, ping) -> bool:
        port = await self.with_retry(node, ping, 3)  # clean: deallocated after the launch
        if not port:
            return False
        await self.launch(node, -1, port)
        self.ports.deallocate(port)
        return True

    async def measure(self, node: str, fn) -> float:
        async with await self.quota.charge():  # clean: __aexit__ uncharges
            t0 = time.monotonic()
            await fn(node)
            return time.monotonic() - t0

    async def measure_all(self, nodes: list, fn) -> dict:
        out = {}
        for node in nodes:
            charge = await self.quota.charge()  # leak: nodes that are already measured continue with the charge
            if node in out:
                continue
            t0 = time.monotonic()
            await fn(node)
            out[node] = time.monotonic() - t0
            charge.quota.uncharge()
        return out

    async def gather_stats(self, nodes: list, fn) -> list:
        async def one(node):
            async with await self.quota.charge():  # clean: __aexit__ uncharges
                return await fn(node)

        return await asyncio.gather(*(one(n) for n in nodes))

    def swap_ranks(self, node: str, rank: int) -> bool:
        fresh = self.slots.assign(node)  # leak: the worker stays under its old rank, the new one is unused
        if fresh is None or rank not in self.workers:
            return False
        self.workers[rank].node = node
        log.info("rank %d now on %s", rank, node)
        return True

    async def shutdown(self) -> None:
        for rank in list(self.workers):
            await self.stop(rank)
        for node in list(self.reserved):
            self.unreserve(node)
