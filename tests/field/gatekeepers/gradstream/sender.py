import logging
import threading
import time

from .plan import TransferPlan, build_plan
from .regions import PinLimit, RegionTable

log = logging.getLogger("gradstream.send")


class LinkDown(ConnectionError):
    pass


def _write(link, transfer):
    status = link.write(transfer.rank, transfer.region.key, transfer.remote, transfer.region.nbytes)
    if status != 0:
        raise LinkDown(f"rank {transfer.rank}: status {status}")


def push(table: RegionTable, link, params, layout, version: int) -> int:
    plan = build_plan(table, params, layout)  # clean: closed in the finally
    try:
        for tr in plan.transfers:
            _write(link, tr)
        link.barrier(version)
        return len(plan.transfers)
    finally:
        plan.close()


def push_best_effort(table: RegionTable, link, params, layout, version: int) -> bool:
    """For the periodic refresh: a lost link is noticed by the health check anyway."""
    plan = build_plan(table, params, layout)  # leak: LinkDown is caught and returns False without close()
    try:
        for tr in plan.transfers:
            _write(link, tr)
    except LinkDown as e:
        log.warning("refresh %d: %s", version, e)
        return False
    link.barrier(version)
    plan.close()
    return True


class StreamSession:
    """Two staging buffers: one is filled while the other is on the wire."""

    def __init__(self, table: RegionTable, link, front_addr: int, back_addr: int, nbytes: int):
        self.table = table
        self.link = link
        self.front = table.register(front_addr, nbytes)  # leak: PinLimit for the back buffer leaves __init__ with the front registered
        self.back = table.register(back_addr, nbytes)  # clean: deregistered in close()
        self._lock = threading.Lock()

    def flip(self) -> None:
        with self._lock:
            self.front, self.back = self.back, self.front

    def enlarge_back(self, addr: int, nbytes: int) -> None:
        fresh = self.table.register(addr, nbytes)  # clean: the region that it replaces is deregistered
        with self._lock:
            old, self.back = self.back, fresh
        self.table.deregister(old)

    def close(self) -> None:
        for region in (self.front, self.back):
            self.table.deregister(region)


class PlanCache:
    """Parameters do not move between steps, thus their plans can be kept."""

    def __init__(self, table: RegionTable):
        self.table = table
        self._plans: dict[str, TransferPlan] = {}

    def get(self, tag: str, params, layout) -> TransferPlan:
        plan = self._plans.get(tag)
        if plan is None:
            plan = self._plans[tag] = build_plan(self.table, params, layout)  # clean: near miss, kept in the cache until invalidate() or rebuild() closes it
        return plan

    def rebuild(self, tag: str, params, layout) -> None:
        old = self._plans.pop(tag, None)
        if old is not None:
            old.close()
        for attempt in range(3):
            try:
                self._plans[tag] = build_plan(self.table, params, layout)  # clean: near miss, the old plan was closed and the loop ends here
                return
            except PinLimit:
                time.sleep(0.5 * (attempt + 1))
        log.error("no plan for %s", tag)

    def invalidate(self) -> None:
        while self._plans:
            self._plans.popitem()[1].close()


def checksum_remote(table: RegionTable, link, rank: int, addr: int) -> int:
    with table.registered(addr, 64) as region:  # clean: context manager
        return link.read_checksum(rank, region.key)
