"""A job and its gang of nodes."""
import enum
import logging

from .nodes import DrainFailed, NoNodes
from .quota import QuotaExceeded

log = logging.getLogger("gang.jobs")


class State(enum.Enum):
    QUEUED = 0
    RUNNING = 1
    ENDED = 2


class Job:
    def __init__(self, name, tenant, low, high, on_end=None):
        self.name = name
        self.tenant = tenant
        self.low = low
        self.high = high
        self.on_end = on_end
        self.state = State.QUEUED
        self.grant = None
        self.burst = None
        self.nodes = []

    # -- placing

    def place(self, quota, inventory):
        """All or nothing."""
        self.grant = quota.ask(self.tenant, self.low)  # clean: the handler refunds it and else end() does
        try:
            while len(self.nodes) < self.low:
                self.nodes.append(inventory.pull(self.name))  # clean: near miss, the handler pushes the partial gang
        except NoNodes:
            self._push_all(inventory)
            quota.refund(self.grant)
            self.grant = None
            return False
        self.state = State.RUNNING
        return True

    def place_in_rack(self, quota, inventory):
        grant = quota.ask(self.tenant, self.low)  # leak: a rack that gives fewer nodes than asked ends here without a refund
        nodes = inventory.pull_rack(self.name, self.low)  # clean: kept in nodes or pushed when there are too few
        if len(nodes) < self.low:
            for node in nodes:
                inventory.push(node)
            return False
        self.grant, self.nodes = grant, nodes
        self.state = State.RUNNING
        return True

    def widen(self, quota, inventory):
        """Up to high nodes, on burst quota."""
        want = self.high - len(self.nodes)
        if want <= 0 or self.burst is not None:
            return 0
        self.burst = quota.ask_softly(self.tenant, want)  # leak: end() refunds the grant but not the burst
        if self.burst is None:
            return 0
        added = 0
        for _ in range(self.burst.amount):
            try:
                self.nodes.append(inventory.pull(self.name))  # clean: in nodes, end() pushes all of them
                added += 1
            except NoNodes:
                break
        return added

    def grow_by_one(self, quota, inventory):
        bigger = len(self.nodes) + 1
        try:
            node = inventory.pull(self.name)  # leak: QuotaExceeded from the exchange is handled with the node still pulled
            self.grant = quota.exchange(self.grant, bigger)  # clean: takes the place of the refunded grant, end() refunds it
        except (NoNodes, QuotaExceeded) as exc:
            log.info("%s stays at %d: %s", self.name, len(self.nodes), exc)
            return False
        self.nodes.append(node)
        return True

    # -- ending

    def _push_all(self, inventory):
        while self.nodes:
            inventory.push(self.nodes.pop())

    def end(self, quota, inventory):
        if self.state is State.ENDED:
            return
        self._push_all(inventory)
        if self.grant is not None:
            quota.refund(self.grant)
            self.grant = None
        self.state = State.ENDED
        if self.on_end is not None:
            self.on_end(self)


def rehearse(job, inventory, check):
    """Check one node with the job's image."""
    node = inventory.pull(job.name)  # leak: DrainFailed is raised by drain() and answered with False, without a push
    try:
        if not check(node):
            inventory.drain(node)
            inventory.push(node)
            return False
    except DrainFailed as exc:
        log.error("cannot drain %s", exc)
        return False
    inventory.push(node)
    return True
