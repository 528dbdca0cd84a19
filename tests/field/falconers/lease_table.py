"""Node leases of the rollout coordinator.

There is one coordinator, so the state is simply the state of this module. A lease
is a node together with a rendezvous port. Nothing expires: dead nodes are found by
the cluster manager, which calls unregister().
"""
import collections
import contextlib
import logging
import threading
import time
import uuid

log = logging.getLogger("coordinator")

_lock = threading.RLock()
_nodes = []
_ports = list(range(29500, 29600))
_leases = {}
_by_owner = {}
_standby = []
_post_mortem = collections.deque(maxlen=4)
_granted = 0


class Exhausted(Exception):
    pass


class NoNode(Exhausted):
    pass


class NoPort(Exhausted):
    pass


class RolloutFailed(Exception):
    pass


def register(node):
    with _lock:
        if node not in _nodes:
            _nodes.append(node)


def unregister(node):
    with _lock:
        if node in _nodes:
            _nodes.remove(node)


def take_port():
    with _lock:
        if not _ports:
            raise NoPort()
        return _ports.pop()  # clean: returned to the caller


def give_port(port):
    with _lock:
        _ports.append(port)


def grant(owner):
    global _granted
    with _lock:
        if not _nodes:
            raise NoNode(owner)
        node = _nodes.pop(0)  # leak: take_port() raises NoPort when the node is already out of the list
        port = take_port()  # clean: near miss, part of the lease and given back by surrender()
        lease = {"id": uuid.uuid4().hex, "owner": owner, "node": node, "port": port, "since": time.time()}
        _leases[lease["id"]] = lease
        _granted += 1
    log.info("%s -> %s:%d", owner, node, port)
    return lease


def surrender(lease):
    """Harmless when called twice."""
    with _lock:
        if _leases.pop(lease["id"], None) is None:
            return
        _nodes.append(lease["node"])
        give_port(lease["port"])


def try_grant(owner):
    try:
        return grant(owner)  # clean: returned to the caller
    except Exhausted:
        return None


@contextlib.contextmanager
def leased(owner):
    lease = grant(owner)  # clean: surrendered in the finally
    try:
        yield lease
    finally:
        surrender(lease)


# Owners -----------------------------------------------------------------------

def assign(owner):
    """The node of an owner, for as long as the owner lives."""
    lease = grant(owner)  # leak: a second assign of the same owner overwrites the entry
    with _lock:
        _by_owner[owner] = lease
    return lease["node"], lease["port"]


def owner_gone(owner):
    with _lock:
        lease = _by_owner.pop(owner, None)
    if lease is not None:
        surrender(lease)


def move(owner):
    """Give an owner another node, for example because the old one is slow."""
    with _lock:
        old = _by_owner.get(owner)
    if old is None:
        return False
    fresh = try_grant(owner)  # clean: near miss, takes the place of the old lease, which is surrendered
    if fresh is None:
        return False
    with _lock:
        _by_owner[owner] = fresh
    surrender(old)
    return True


# Standby nodes ----------------------------------------------------------------

def fill_standby(count):
    """Keep a few nodes warm so that a failed rollout can go on at once."""
    while len(_standby) < count:
        lease = try_grant("standby")  # leak: trim_standby() cuts the list without surrendering what it cuts
        if lease is None:
            break
        _standby.append(lease)
    return len(_standby)


def trim_standby(count):
    if len(_standby) > count:
        log.info("standby %d -> %d", len(_standby), count)
        del _standby[count:]


def drain_standby():
    while _standby:
        surrender(_standby.pop())


# Jobs -------------------------------------------------------------------------

def gang(owner, count):
    """All nodes or none."""
    leases = []
    try:
        for rank in range(count):
            leases.append(grant("%s/%d" % (owner, rank)))  # clean: near miss, the handler surrenders those before
    except Exhausted as exc:
        log.info("gang of %d for %s: %r", count, owner, exc)
        for lease in leases:
            surrender(lease)
        return []
    return leases


def run_gang(owner, count, launch):
    leases = gang(owner, count)  # clean: surrendered in the finally, an empty list needs nothing
    if not leases:
        return None
    try:
        master = leases[0]
        return launch([l["node"] for l in leases], master["node"], master["port"])
    finally:
        for lease in leases:
            surrender(lease)


def run_rollout(owner, job):
    lease = grant(owner)  # clean: surrendered after the else and after the handler
    try:
        result = job(lease["node"], lease["port"])
    except RolloutFailed as exc:
        log.warning("%s on %s: %s", owner, lease["node"], exc)
        result = None
    surrender(lease)
    return result


def run_debug(owner, job):
    """Like run_rollout, but a node that failed is kept for inspection."""
    lease = grant(owner)  # leak: the bounded deque of failed leases silently pushes out its oldest
    try:
        result = job(lease["node"], lease["port"])
    except RolloutFailed:
        _post_mortem.append(lease)
        return None
    surrender(lease)
    return result


def end_post_mortem():
    while _post_mortem:
        surrender(_post_mortem.popleft())


def benchmark(wanted, measure):
    """Times per node; nodes that are not wanted are skipped."""
    times = {}
    with _lock:
        rounds = len(_nodes)
    for _ in range(rounds):
        lease = try_grant("benchmark")  # clean: near miss, the continue stands after the surrender
        if lease is None:
            continue
        node = lease["node"]
        took = measure(node) if node in wanted else None
        surrender(lease)
        if took is None:
            continue
        times[node] = took
    return times


def rendezvous_ports():
    """Two neighbouring ports, for TCP store and NCCL bootstrap."""
    first = take_port()  # leak: take_port() raises NoPort for the second one, and a pair that does not match gives back one
    second = take_port()  # clean: given back or returned
    if abs(first - second) != 1:
        give_port(second)
        return None
    return min(first, second), max(first, second)


def with_store(fn, *args):
    port = take_port()  # clean: given back in the finally
    try:
        return fn(port, *args)
    finally:
        give_port(port)


def smoke_test(job):
    with leased("smoke") as lease:  # clean: the with statement surrenders it
        job(lease["node"], lease["port"])
