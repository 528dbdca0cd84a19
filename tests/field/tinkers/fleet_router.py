"""Router of the Wayfarer fleet: replicas, breaker probes, drain holds, sticky routes, ports."""
from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set


@dataclass(order=True)
class Replica:
    inflight: int
    name: str = field(compare=False)
    served: int = field(default=0, compare=False)


class ReplicaBoard:
    """Least loaded first. Who picks a replica adds to its load, and says when the call is over."""

    def __init__(self, names: List[str], ceiling: int) -> None:
        self._replicas = [Replica(0, n) for n in names]
        self._ceiling = ceiling
        self._lock = threading.Lock()

    def pick(self, shun: Optional[Set[str]] = None) -> Optional[Replica]:
        with self._lock:
            able = [r for r in self._replicas if r.inflight < self._ceiling and r.name not in (shun or ())]
            if not able:
                return None
            replica = min(able)
            replica.inflight += 1
            return replica

    def over(self, replica: Replica) -> None:
        with self._lock:
            replica.inflight -= 1
            replica.served += 1

    def load(self) -> int:
        return sum(r.inflight for r in self._replicas)


def route(board: ReplicaBoard, req, call):
    replica = board.pick()  # clean: near miss, None raises and else over is said in finally
    if replica is None:
        raise ConnectionError("no replica")
    try:
        return call(replica.name, req)
    finally:
        board.over(replica)


def route_with_retry(board: ReplicaBoard, req, call, tries: int = 3):
    shun: Set[str] = set()
    for _ in range(tries):
        replica = board.pick(shun)  # leak: a replica that failed is shunned but over is not said
        if replica is None:
            break
        try:
            answer = call(replica.name, req)
        except ConnectionError:
            shun.add(replica.name)
            continue
        board.over(replica)
        return answer
    return None


def hedge(board: ReplicaBoard, req, start_call, first_done):
    first = board.pick()  # leak: when the second call wins over is said for the second replica only
    if first is None:
        return None
    second = board.pick({first.name})  # clean: near miss, None leaves one call alone and else over is said
    if second is None:
        answer = start_call(first.name, req).result()
        board.over(first)
        return answer
    race = [start_call(first.name, req), start_call(second.name, req)]
    winner = first_done(race)
    board.over(second)
    if winner is race[1]:
        return winner.result()
    board.over(first)
    return winner.result()


class Breaker:
    """A circuit breaker; while half open it hands out few probes, each of which must be reported."""

    def __init__(self, probes: int, cool: float) -> None:
        self._probes = probes
        self._cool = cool
        self._out = 0
        self._opened_at: Optional[float] = None

    def try_probe(self) -> bool:
        if self._opened_at is not None and time.monotonic() - self._opened_at < self._cool:
            return False
        if self._out >= self._probes:
            return False
        self._out += 1
        return True

    def report(self, ok: bool) -> None:
        self._out -= 1
        self._opened_at = None if ok else time.monotonic()


def guarded_call(breaker: Breaker, call) -> Optional[bytes]:
    if not breaker.try_probe():  # leak: the timeout is caught and returned without a report
        return None
    try:
        answer = call()
    except TimeoutError:
        return None
    except ConnectionError:
        breaker.report(False)
        return None
    breaker.report(True)
    return answer


def guarded_check(breaker: Breaker, check) -> bool:
    if not breaker.try_probe():  # clean: each way after it reports once
        return False
    try:
        ok = check()
    except (TimeoutError, ConnectionError):
        ok = False
    breaker.report(ok)
    return ok


class HoldToken:
    __slots__ = ("node", "reason", "since")

    def __init__(self, node: str, reason: str) -> None:
        self.node = node
        self.reason = reason
        self.since = time.monotonic()


class DrainHolds:
    """A node does not drain while anything holds it back."""

    def __init__(self) -> None:
        self._holds: Dict[str, Set[HoldToken]] = {}
        self._cv = threading.Condition()

    def hold_back(self, node: str, reason: str) -> HoldToken:
        token = HoldToken(node, reason)
        with self._cv:
            self._holds.setdefault(node, set()).add(token)
        return token

    def lift(self, token: HoldToken) -> None:
        with self._cv:
            held = self._holds[token.node]
            held.remove(token)
            if not held:
                del self._holds[token.node]
                self._cv.notify_all()

    def wait_drained(self, node: str, timeout: float) -> bool:
        with self._cv:
            return self._cv.wait_for(lambda: node not in self._holds, timeout)


def migrate_sessions(holds: DrainHolds, node: str, sessions, move) -> int:
    token = holds.hold_back(node, "migration")  # leak: a session that will not move ends the function under the hold
    moved = 0
    for session in sessions:
        if not move(session):
            return moved
        moved += 1
    holds.lift(token)
    return moved


def snapshot_nodes(holds: DrainHolds, nodes: List[str], snapshot) -> Dict[str, object]:
    tokens = {n: holds.hold_back(n, "snapshot") for n in nodes}  # clean: all in the dict are lifted
    shots = {}
    try:
        for node in nodes:
            shots[node] = snapshot(node)
    finally:
        for token in tokens.values():
            holds.lift(token)
    return shots


class Watcher:
    def __init__(self, holds: DrainHolds) -> None:
        self.holds = holds
        self.tokens: Dict[str, HoldToken] = {}

    def on_busy(self, node: str) -> None:
        if node not in self.tokens:
            self.tokens[node] = self.holds.hold_back(node, "busy")  # clean: near miss, on_idle lifts and on_gone too

    def on_idle(self, node: str) -> None:
        token = self.tokens.pop(node, None)
        if token is not None:
            self.holds.lift(token)

    def on_gone(self, nodes: List[str]) -> None:
        for node in nodes:
            self.on_idle(node)


class StickyRoutes:
    """Conversations affixed to replicas, with a cap for each replica."""

    def __init__(self, replicas: List[str], cap: int) -> None:
        self._counts = {r: 0 for r in replicas}
        self._cap = cap
        self._routes: Dict[str, str] = {}

    def affix(self, conversation: str) -> str:
        if conversation in self._routes:
            raise KeyError(f"{conversation} is affixed")
        free = [r for r, n in self._counts.items() if n < self._cap]
        if not free:
            raise OverflowError("every replica is at its cap")
        replica = random.choice(free)
        self._counts[replica] += 1
        self._routes[conversation] = replica
        return replica

    def loosen(self, conversation: str) -> None:
        self._counts[self._routes.pop(conversation)] -= 1


def converse(sticky: StickyRoutes, conversation: str, turns, send) -> List[str]:
    replica = sticky.affix(conversation)  # leak: an empty answer returns the turns so far and does not loosen
    answers = []
    for turn in turns:
        answer = send(replica, turn)
        if not answer:
            return answers
        answers.append(answer)
    sticky.loosen(conversation)
    return answers


def trial(sticky: StickyRoutes, conversation: str, send) -> bool:
    try:
        replica = sticky.affix(conversation)  # clean: refused holds nothing, else loosened after the send
    except OverflowError:
        return False
    try:
        send(replica, "ping")
        return True
    except ConnectionError:
        return False
    finally:
        sticky.loosen(conversation)


class SidecarPorts:
    """Ports for sidecars on this host. Listening takes one from the range, shutting gives it back."""

    def __init__(self, low: int, high: int) -> None:
        self._idle = set(range(low, high))
        self._cooling: List[int] = []

    def listen(self) -> int:
        if not self._idle:
            self._idle.update(self._cooling)
            self._cooling.clear()
        if not self._idle:
            raise OSError(98, "no port")
        return self._idle.pop()

    def shut(self, port: int) -> None:
        self._cooling.append(port)


def launch_sidecar(ports: SidecarPorts, spawn) -> Optional[object]:
    port = ports.listen()  # leak: a process that dies at once gives None and the port is not shut
    process = spawn(port)
    if process.poll() is not None:
        return None
    process.on_exit(lambda: ports.shut(port))
    return process


def find_bindable(ports: SidecarPorts, can_bind, tries: int) -> int:
    for _ in range(tries):
        port = ports.listen()  # clean: shut when it can not be bound, returned else
        if can_bind(port):
            return port
        ports.shut(port)
    raise OSError(98, "no port can be bound")


def port_pair(ports: SidecarPorts, spawn_pair) -> bool:
    rpc = ports.listen()  # leak: shut is said for the metrics port only when the pair fails
    metrics = ports.listen()  # clean: shut on failure, given to the pair on success
    pair = spawn_pair(rpc, metrics)
    if pair is None:
        ports.shut(metrics)
        return False
    pair.on_exit(lambda: (ports.shut(rpc), ports.shut(metrics)))
    return True


class HealthHistory:
    """The last few probe results of each replica."""

    def __init__(self, keep: int = 8) -> None:
        self._keep = keep
        self._rows: Dict[str, List[bool]] = {}

    def enter(self, name: str, ok: bool) -> float:
        row = self._rows.setdefault(name, [])
        row.append(ok)
        del row[:-self._keep]
        return sum(row) / len(row)

    def leave(self, name: str) -> None:
        self._rows.pop(name, None)


def flapping(history: HealthHistory, probes) -> List[str]:
    found = []
    for name, ok in probes:
        share = history.enter(name, ok)  # clean: a bounded record of results
        if share in (0.0, 1.0):
            continue
        found.append(name)
    return found
