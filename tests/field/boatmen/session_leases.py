# Sticky sessions: which worker holds the KV cache of which conversation.
# Plain functions over module state; everything runs in the router's one thread
# apart from `janitor`, which takes the same lock.

import logging
import threading
import time
import uuid

log = logging.getLogger("sticky")

TTL = 120.0
MAX_PER_WORKER = 24

_lock = threading.RLock()
_seats = {}        # worker -> list of free seat numbers
_leases = {}       # token -> dict(worker, seat, expires, sid)
_by_session = {}   # sid -> token
_draining = set()
_quota = {}        # tenant -> seats in use
_quota_max = 64

class SeatUnavailable(Exception): pass
class QuotaExceeded(Exception): pass
class Refused(Exception): pass

def add_worker(worker, n=MAX_PER_WORKER):
    with _lock:
        _seats[worker] = list(range(n))

def take_seat(worker):
    free = _seats.get(worker)
    if not free:
        raise SeatUnavailable(worker)
    return free.pop()  # clean: the caller has the seat

def free_seat(worker, seat):
    if worker in _seats:
        _seats[worker].append(seat)

def charge(tenant, n=1):
    with _lock:
        used = _quota.get(tenant, 0)
        if used + n > _quota_max:
            raise QuotaExceeded(tenant)
        _quota[tenant] = used + n
        return n

def refund(tenant, n=1):
    with _lock:
        _quota[tenant] = max(0, _quota.get(tenant, 0) - n)

def least_loaded():
    best, room = None, 0
    for worker, free in _seats.items():
        if worker in _draining:
            continue
        if len(free) > room:
            best, room = worker, len(free)
    return best

def grant(sid, tenant, worker=None):
    """A lease for a session. Returns its token."""
    with _lock:
        if sid in _by_session:
            return renew(_by_session[sid])
        charge(tenant)  # leak: SeatUnavailable, by hand or from take_seat, leaves without a refund
        worker = worker or least_loaded()
        if worker is None:
            raise SeatUnavailable("all workers are full")
        seat = take_seat(worker)  # clean: in the lease table, from where revoke() frees it
        token = uuid.uuid4().hex
        _leases[token] = dict(worker=worker, seat=seat, sid=sid, tenant=tenant, expires=time.time() + TTL)
        _by_session[sid] = token
        return token

def renew(token):
    _leases[token]["expires"] = time.time() + TTL
    return token

def revoke(token):
    with _lock:
        shrink(token)
        lease = _leases.pop(token, None)
        if lease is None:
            return False
        if _by_session.get(lease["sid"]) == token:
            del _by_session[lease["sid"]]
        free_seat(lease["worker"], lease["seat"])
        refund(lease["tenant"])
        return True

def migrate(token, target):
    """Moves a lease to another worker. The KV cache is copied by the caller afterwards."""
    with _lock:
        lease = _leases.get(token)
        if lease is None or lease["worker"] == target:
            return False
        try:
            seat = take_seat(target)  # clean: near miss, written into the lease after the old seat was freed
        except SeatUnavailable:
            return False
        shrink(token)
        free_seat(lease["worker"], lease["seat"])
        lease["worker"], lease["seat"] = target, seat
        return True

def grow(token, n, clone):
    """Extra seats for parallel sampling on the same worker."""
    with _lock:
        lease = _leases[token]
        if lease.get("extra"):
            return []
        extra = []
        try:
            charge(lease["tenant"], n)  # clean: near miss, refunded in the handler or by shrink()
        except QuotaExceeded:
            return []
        try:
            for _ in range(n):
                extra.append(take_seat(lease["worker"]))  # leak: the handler refunds the quota and drops the seats that were already taken
        except SeatUnavailable:
            refund(lease["tenant"], n)
            return []
        for seat in extra:
            clone(lease["seat"], seat)
        lease["extra"] = extra
        return extra

def shrink(token):
    with _lock:
        lease = _leases.get(token)
        if lease is None:
            return
        for seat in lease.pop("extra", []):
            free_seat(lease["worker"], seat)
            refund(lease["tenant"])

def borrow_for_probe(worker):
    """Yields once, with a seat nobody else can have meanwhile."""
    seat = take_seat(worker)  # clean: freed when the generator is finished or closed
    try:
        yield seat
    finally:
        free_seat(worker, seat)

def probe(worker, send):
    try:
        gen = borrow_for_probe(worker)  # clean: closed at the end of the inner try
        try:
            return send(worker, next(gen))
        finally:
            gen.close()
    except SeatUnavailable:
        return None

def handle(sid, tenant, request, send):
    """One turn of a conversation."""
    try:
        token = grant(sid, tenant)  # clean: near miss, kept for the next turn on purpose, the janitor revokes it after TTL
    except (SeatUnavailable, QuotaExceeded) as exc:
        log.info("%s: %r", sid, exc)
        return {"error": "busy", "retry_after": 1.0}
    lease = _leases[token]
    try:
        return send(lease["worker"], lease["seat"], request)
    except ConnectionError:
        log.warning("worker %s lost", lease["worker"])
        revoke(token)
        return {"error": "worker lost"}

def handle_stateless(tenant, request, send, retries=3):
    """For requests without a session: any seat will do, and only for this call."""
    charge(tenant)  # clean: refunded in the finally
    try:
        for attempt in range(retries):
            with _lock:
                worker = least_loaded()
                if worker is None:
                    time.sleep(0.01 * 2 ** attempt)
                    continue
                seat = take_seat(worker)  # leak: a ConnectionError starts the next attempt before free_seat
            try:
                answer = send(worker, seat, request)
            except ConnectionError as exc:
                log.warning("attempt %d on %s: %s", attempt, worker, exc)
                continue
            free_seat(worker, seat)
            return answer
        return {"error": "no worker"}
    finally:
        refund(tenant)

def reassign(sid, worker, seat_hint=None):
    """Operator command: put a session onto a given worker, whatever it had."""
    with _lock:
        old = _by_session.pop(sid, None)
        tenant = _leases[old]["tenant"] if old else "operator"
        token = grant(sid, tenant, worker)  # clean: near miss, in the lease table, and so is the old one, where the janitor finds both
        log.info("%s: %s -> %s (hint %s)", sid, old, token, seat_hint)
        return token

def drain(worker):
    """No new leases; the sessions move elsewhere where there is room."""
    with _lock:
        _draining.add(worker)
        for token, lease in list(_leases.items()):
            if lease["worker"] == worker:
                target = least_loaded()
                if target is not None:
                    migrate(token, target)
        if not any(l["worker"] == worker for l in _leases.values()):
            _seats.pop(worker, None)
            _draining.discard(worker)

def reserve_batch(tenant, worker, n):
    """n seats for an offline job, as a list; given back with finish_batch."""
    charge(tenant, n)  # leak: a worker with fewer seats makes it return None with the quota charged
    with _lock:
        if len(_seats.get(worker, ())) < n:
            return None
        return [take_seat(worker) for _ in range(n)]  # clean: near miss, there are enough of them and they are returned

def finish_batch(tenant, worker, seats):
    for seat in seats:
        free_seat(worker, seat)
    refund(tenant, len(seats))

def accepted(answer):
    if answer.get("refused"):
        raise Refused(answer["refused"])
    return answer

def offline_job(tenant, worker, items, send):
    seats = reserve_batch(tenant, worker, min(8, len(items)))  # leak: the handler of Refused returns ahead of finish_batch
    if seats is None:
        return None
    results = []
    for i, item in enumerate(items):
        answer = send(worker, seats[i % len(seats)], item)
        try:
            results.append(accepted(answer))
        except Refused:
            return results
    finish_batch(tenant, worker, seats)
    return results

def janitor(stop, period=5.0):
    while not stop.wait(period):
        now = time.time()
        with _lock:
            stale = [t for t, l in _leases.items() if l["expires"] < now]
        for token in stale:
            revoke(token)
