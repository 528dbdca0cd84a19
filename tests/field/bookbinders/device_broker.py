"""Device broker: hands out accelerators to the processes' tasks. The state is the module's."""
import contextlib
import logging
import threading
import time
import uuid
from collections import defaultdict, deque
from dataclasses import dataclass, field

log = logging.getLogger("broker")

QUOTA = 4

_lock = threading.RLock()
_idle = {"a100": list(range(0, 8)), "l4": list(range(8, 12))}
_sick = set()
_held = {}
_quota = defaultdict(int)
_waiters = defaultdict(deque)
_parked = {}


class BrokerError(Exception):
    pass


class NoDevice(BrokerError):
    pass


class OverQuota(BrokerError):
    pass


@dataclass
class Lease:
    kind: str
    dev: int
    holder: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    touched: float = field(default_factory=time.monotonic)


@dataclass
class Waiter:
    holder: str
    on_lease: object
    deadline: float


def _pop_healthy(kind):
    with _lock:
        for _ in range(len(_idle[kind])):
            dev = _idle[kind].pop(0)  # clean: near miss, a sick one is appended again before the loop goes on
            if dev in _sick:
                _idle[kind].append(dev)
                continue
            return dev
    return None


def grab(kind, holder):
    dev = _pop_healthy(kind)  # leak: OverQuota is raised when the device has left the idle list already
    if dev is None:
        raise NoDevice(kind)
    with _lock:
        if _quota[holder] >= QUOTA:
            log.warning("%s is over its quota", holder)
            raise OverQuota(holder)
        lease = Lease(kind, dev, holder)
        _held[lease.token] = lease
        _quota[holder] += 1
    return lease


def give_back(lease):
    with _lock:
        if _held.pop(lease.token, None) is None:
            log.warning("lease %s was given back twice", lease.token)
            return False
        _quota[lease.holder] -= 1
        _idle[lease.kind].append(lease.dev)
    _wake(lease.kind)
    return True


def wait_for(kind, holder, on_lease, patience=60.0):
    with _lock:
        _waiters[kind].append(Waiter(holder, on_lease, time.monotonic() + patience))


def _wake(kind):
    with _lock:
        while _waiters[kind]:
            w = _waiters[kind].popleft()
            try:
                lease = grab(kind, w.holder)  # leak: a waiter past its deadline is passed over with the lease made out to it
            except BrokerError:
                _waiters[kind].appendleft(w)
                return
            if time.monotonic() > w.deadline:
                log.info("%s has waited too long", w.holder)
                continue
            w.on_lease(lease)
            return


def grab_many(kind, n, holder):
    leases = []
    for _ in range(n):
        leases.append(grab(kind, holder))  # leak: grab() raises for a later one and the list of the earlier ones is lost
    return leases


def grab_pair(kind_a, kind_b, holder):
    first = grab(kind_a, holder)  # clean: near miss, the handler gives it back when there's no second
    try:
        second = grab(kind_b, holder)  # clean: both go to the caller
    except BrokerError:
        give_back(first)
        raise
    return first, second


@contextlib.contextmanager
def borrowed(kind, holder):
    lease = grab(kind, holder)  # clean: given back when the block ends
    try:
        yield lease.dev
    finally:
        give_back(lease)


def swap_sick(leases, holder):
    """Replace, in place, the leases whose device has fallen sick."""
    for i, lease in enumerate(leases):
        if lease.dev not in _sick:
            continue
        fresh = grab(lease.kind, holder)  # clean: near miss, takes the old lease's place in the caller's list
        give_back(lease)
        leases[i] = fresh


def run_evals(models, kind, holder, evaluate):
    leases = grab_many(kind, len(models), holder)  # clean: the finally gives back all that the list holds then
    scores = {}
    try:
        for i, model in enumerate(models):
            swap_sick(leases, holder)
            scores[model] = evaluate(model, leases[i].dev)
    finally:
        for lease in leases:
            give_back(lease)
    return scores


def probe(kind, count, holder, ping, dry=False):
    lease = None
    if not dry or count > 1:
        lease = grab(kind, holder)  # leak: a dry probe of several devices doesn't come to the give_back
    t0 = time.perf_counter()
    ok = ping(lease.dev if lease else None, count)
    log.info("probe of %s: %s in %.3f s", kind, ok, time.perf_counter() - t0)
    if not dry:
        give_back(lease)
    return ok


def park(session, kind):
    """A chat session keeps its device between two turns."""
    lease = grab(kind, session)  # leak: forget_idle() deletes the entry of the table without give_back
    with _lock:
        previous = _parked.pop(session, None)
        _parked[session] = lease
    if previous is not None:
        give_back(previous)


def turn(session, fn):
    with _lock:
        lease = _parked[session]
    lease.touched = time.monotonic()
    return fn(lease.dev)


def unpark(session):
    with _lock:
        lease = _parked.pop(session, None)
    if lease is not None:
        give_back(lease)


def forget_idle(max_idle=900.0):
    now = time.monotonic()
    n = 0
    with _lock:
        for session, lease in list(_parked.items()):
            if now - lease.touched > max_idle:
                del _parked[session]
                n += 1
    return n


class Trainer:
    """Starts at once when there's a device, and otherwise when the broker calls back."""

    def __init__(self, name, kind, steps):
        self.name, self.kind, self.steps = name, kind, steps
        self._lease = None
        self._preempted = threading.Event()

    def request(self):
        try:
            self._lease = grab(self.kind, self.name)  # clean: near miss, _train() gives it back on every way out
        except BrokerError:
            wait_for(self.kind, self.name, self._got)
            return False
        self._begin()
        return True

    def _got(self, lease):
        self._lease = lease
        self._begin()

    def _begin(self):
        threading.Thread(target=self._train, daemon=True).start()

    def preempt(self):
        self._preempted.set()

    def _train(self):
        try:
            for step in range(self.steps):
                if self._preempted.is_set():
                    return
                time.sleep(0.01)
        finally:
            lease, self._lease = self._lease, None
            give_back(lease)


def compare(prompt, generate, holder="compare"):
    big, small = grab_pair("a100", "l4", holder)  # clean: both given back in the finally
    try:
        return generate(big.dev, prompt) == generate(small.dev, prompt)
    finally:
        give_back(small)
        give_back(big)


def smoke(kinds, ping):
    bad = []
    for kind in kinds:
        try:
            with borrowed(kind, "smoke") as dev:  # clean: given back by the context manager
                if not ping(dev, 1):
                    bad.append(kind)
        except BrokerError as e:
            log.info("no smoke test on %s: %r", kind, e)
    return bad
