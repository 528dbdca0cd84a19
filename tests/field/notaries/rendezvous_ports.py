"""Rendezvous of training jobs: ports, barrier tickets and heartbeats of a node agent."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


class PortRange:
    def __init__(self, low: int, high: int) -> None:
        self._free = set(range(low, high))
        self._mutex = threading.Lock()

    def bind(self) -> int:
        with self._mutex:
            return self._free.pop()

    def unbind(self, port: int) -> None:
        with self._mutex:
            self._free.add(port)


class TicketDesk:
    """Tickets of the barrier; a group can only form when the desk has one left."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._mutex = threading.Lock()

    def draw(self) -> bool:
        with self._mutex:
            if self._left == 0:
                return False
            self._left -= 1
            return True

    def hand_in(self) -> None:
        with self._mutex:
            self._left += 1


@dataclass
class Group:
    name: str
    port: int
    debug_port: int | None = None
    members: set[str] = field(default_factory=set)
    closing: bool = False


class Agent:
    def __init__(self, ports: PortRange, desk: TicketDesk, store) -> None:
        self.ports = ports
        self.desk = desk
        self.store = store
        self.groups: dict[str, Group] = {}
        self.started = False
        self.control_port = -1
        self.metrics_port = -1

    def start(self, with_metrics: bool) -> None:
        if self.started:
            return
        self.control_port = self.ports.bind()  # clean: near miss, started guards start() and stop() alike
        if with_metrics:
            self.metrics_port = self.ports.bind()  # leak: stop() unbinds only the control port
        self.store.publish("control", self.control_port)
        self.started = True

    def stop(self) -> None:
        if not self.started:
            return
        for name in list(self.groups):
            self.dissolve(name)
        self.ports.unbind(self.control_port)
        self.metrics_port = -1
        self.started = False

    def form(self, name: str, debug: bool) -> Group | None:
        if name in self.groups:
            return self.groups[name]
        if not self.desk.draw():  # clean: near miss, dissolve() hands it in for every group
            return None
        group = Group(name, self.ports.bind())  # clean: dissolve() unbinds it
        if debug:
            group.debug_port = self.ports.bind()  # clean: near miss, dissolve() tests the port itself
        self.groups[name] = group
        self.store.publish(name, group.port)
        return group

    def join(self, name: str, member: str, size: int) -> bool:
        group = self.form(name, debug=False)  # clean: the group is in the agent's table
        if group is None:
            return False
        group.members.add(member)
        return len(group.members) == size

    def dissolve(self, name: str) -> None:
        group = self.groups.pop(name, None)
        if group is None:
            return
        self.ports.unbind(group.port)
        if group.debug_port is not None:
            self.ports.unbind(group.debug_port)
        self.desk.hand_in()


class ElasticAgent:
    """Regroups while running; a closing group keeps its port until the last member has left."""

    def __init__(self, ports: PortRange, desk: TicketDesk) -> None:
        self.ports = ports
        self.desk = desk
        self.groups: dict[str, Group] = {}

    def open(self, name: str) -> bool:
        if name in self.groups:
            return True
        if not self.desk.draw():  # leak: leave() removes a group without handing its ticket in
            return False
        port = self.ports.bind()  # clean: near miss, leave() of the last member unbinds it
        self.groups[name] = Group(name, port)
        return True

    def enter(self, name: str, member: str) -> None:
        group = self.groups[name]
        if not group.closing:
            group.members.add(member)

    def drain(self, name: str) -> None:
        group = self.groups[name]
        group.closing = True
        if not group.members:
            self._remove(group)

    def leave(self, name: str, member: str) -> None:
        group = self.groups[name]
        group.members.discard(member)
        if group.closing and not group.members:
            self._remove(group)

    def _remove(self, group: Group) -> None:
        del self.groups[group.name]
        self.ports.unbind(group.port)


class Heartbeat(threading.Thread):
    """The thread owns its port: run() unbinds when the loop ends."""

    def __init__(self, ports: PortRange, client, period: float) -> None:
        super().__init__(daemon=True)
        self.ports = ports
        self.client = client
        self.period = period
        self.port = ports.bind()  # clean: near miss, unbound at the end of run(), whatever ends the loop
        self._quit = threading.Event()

    def run(self) -> None:
        try:
            while not self._quit.wait(self.period):
                if not self.client.beat(self.port):
                    return
        finally:
            self.ports.unbind(self.port)

    def stop(self) -> None:
        self._quit.set()


class Watchdog(threading.Thread):
    """Looks at a peer until it is silent or the watch is stopped."""

    def __init__(self, ports: PortRange, client, on_silent) -> None:
        super().__init__(daemon=True)
        self.ports = ports
        self.client = client
        self.on_silent = on_silent
        self.port = ports.bind()  # leak: a silent peer ends run() by return, ahead of the unbind
        self._quit = threading.Event()

    def run(self) -> None:
        misses = 0
        while not self._quit.wait(1.0):
            misses = 0 if self.client.ask(self.port) else misses + 1
            if misses == 3:
                self.on_silent(self.port)
                return
        self.ports.unbind(self.port)

    def stop(self) -> None:
        self._quit.set()


def elect_leader(agent_ports: PortRange, candidates: list, quorum: int) -> str | None:
    port = agent_ports.bind()  # clean: near miss, both returns unbind
    votes: dict[str, int] = {}
    for candidate in candidates:
        choice = candidate.ask(port)
        votes[choice] = votes.get(choice, 0) + 1
        if votes[choice] >= quorum:
            agent_ports.unbind(port)
            return choice
    log.info("no quorum of %d in %d votes", quorum, len(candidates))
    agent_ports.unbind(port)
    return None
