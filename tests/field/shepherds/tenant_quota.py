"""Token and concurrency quotas per tenant.

Functional: the state is in a few module-level dicts guarded by one lock, everything else is functions.
charge() takes `n` tokens from a tenant's window, refund() gives them back; enter() and leave() count
requests in flight.
"""
import contextlib
import functools
import logging
import threading
import time

log = logging.getLogger(__name__)

_lock = threading.Lock()
_limits = {}      # tenant -> (tokens, concurrency)
_tokens = {}      # tenant -> tokens left
_inflight = {}    # tenant -> requests in flight
_open_charges = {}  # request id -> (tenant, n)

DEFAULT_LIMIT = (100_000, 16)

class QuotaExceeded(Exception):
    def __init__(self, tenant, what):
        super().__init__(f"{tenant}: {what}")
        self.tenant = tenant
        self.what = what

class BadRequest(Exception):
    pass

def configure(tenant, tokens, concurrency):
    with _lock:
        _limits[tenant] = (tokens, concurrency)
        _tokens.setdefault(tenant, tokens)

def limit_of(tenant):
    return _limits.get(tenant, DEFAULT_LIMIT)

# -- the two pairs ---------------------------------------------------------

def charge(tenant, n):
    """Take n tokens, True if there were that many."""
    with _lock:
        left = _tokens.get(tenant, limit_of(tenant)[0])
        if left < n:
            return False
        _tokens[tenant] = left - n
        return True

def refund(tenant, n):
    if n <= 0:
        return
    with _lock:
        cap = limit_of(tenant)[0]
        _tokens[tenant] = min(cap, _tokens.get(tenant, cap) + n)

def enter(tenant):
    """Count one request in; raises QuotaExceeded at the limit."""
    with _lock:
        now = _inflight.get(tenant, 0)
        if now >= limit_of(tenant)[1]:
            raise QuotaExceeded(tenant, "concurrency")
        _inflight[tenant] = now + 1

def leave(tenant):
    with _lock:
        now = _inflight.get(tenant, 0)
        if now <= 1:
            _inflight.pop(tenant, None)
        else:
            _inflight[tenant] = now - 1

# -- shapes in which they are used ------------------------------------------

@contextlib.contextmanager
def in_flight(tenant):
    enter(tenant)  # clean: finally leaves
    try:
        yield
    finally:
        leave(tenant)

def limited(fn):
    """Decorator for handlers whose first argument is the tenant."""
    @functools.wraps(fn)
    def wrapper(tenant, *args, **kwargs):
        with in_flight(tenant):  # clean: with block
            return fn(tenant, *args, **kwargs)
    return wrapper

def estimate(body):
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise BadRequest("prompt must be a string")
    return len(prompt) // 4 + 1

def max_tokens(body):
    n = body.get("max_tokens", 256)
    if not isinstance(n, int) or n < 1:
        raise BadRequest("max_tokens must be a positive integer")
    return n

def handle_chat(tenant, body, backend):
    """The synchronous endpoint: returns (status, payload)."""
    try:
        enter(tenant)  # leak: a BadRequest from estimate() or max_tokens() is answered without leave()
        cost = estimate(body) + max_tokens(body)
    except QuotaExceeded as exc:
        return 429, {"error": exc.what}
    except BadRequest as exc:
        return 400, {"error": str(exc)}
    try:
        if not charge(tenant, cost):  # clean: near miss, the part that was not used is refunded, the rest is spent on purpose
            return 429, {"error": "tokens"}
        reply, used = backend(body)
        refund(tenant, cost - used)
        return 200, reply
    finally:
        leave(tenant)

def open_stream(tenant, request_id, body):
    """Charge for a stream; settle_stream() closes the account when it ends."""
    cost = estimate(body) + max_tokens(body)
    if not charge(tenant, cost):  # leak: a request id that comes twice overwrites the charge recorded before
        raise QuotaExceeded(tenant, "tokens")
    with _lock:
        _open_charges[request_id] = (tenant, cost)
    return cost

def settle_stream(request_id, used):
    with _lock:
        entry = _open_charges.pop(request_id, None)
    if entry is None:
        log.warning("stream %s has no charge", request_id)
        return
    tenant, cost = entry
    refund(tenant, cost - used)

def stream_chat(tenant, request_id, body, backend):
    """Generator of chunks."""
    enter(tenant)  # leak: open_stream() raises QuotaExceeded or BadRequest before the try
    open_stream(tenant, request_id, body)
    used = 0
    try:
        for chunk in backend(body):
            used += chunk["tokens"]
            yield chunk
    finally:
        settle_stream(request_id, used)
        leave(tenant)

def reserve_batch(tenant, items):
    """Charge for a whole batch or for nothing. Returns the list of costs, None if it is too much."""
    costs = []
    for item in items:
        cost = item["tokens"]
        if not charge(tenant, cost):  # clean: near miss, what was taken so far is refunded before None is returned
            for c in costs:
                refund(tenant, c)
            return None
        costs.append(cost)
    return costs

def run_batch(tenant, items, backend):
    costs = reserve_batch(tenant, items)  # leak: an item that fails is caught and its cost is not refunded
    if costs is None:
        raise QuotaExceeded(tenant, "batch")
    results = []
    for item, cost in zip(items, costs):
        try:
            out, used = backend(item)
        except TimeoutError:
            log.info("item %s timed out", item.get("id"))
            results.append(None)
            continue
        refund(tenant, cost - used)
        results.append(out)
    return results

@limited
def handle_embed(tenant, body, backend):
    cost = estimate(body)
    if not charge(tenant, cost):  # clean: an embedding uses what it was charged; failure refunds
        raise QuotaExceeded(tenant, "tokens")
    try:
        return backend(body)
    except Exception:
        refund(tenant, cost)
        raise

class Ticket:
    """One concurrency unit as an object that can be passed on to another thread."""

    def __init__(self, tenant):
        enter(tenant)  # clean: the ticket owns it, close() leaves
        self.tenant = tenant
        self.closed = False
        self.at = time.monotonic()

    def close(self):
        if not self.closed:
            self.closed = True
            leave(self.tenant)

def enqueue(tenant, body, jobs):
    """Hand a request to the worker queue; the worker closes the ticket."""
    ticket = Ticket(tenant)  # clean: near miss, given on to the worker, or closed when the queue is full
    try:
        jobs.put_nowait((ticket, body))
    except Exception:
        ticket.close()
        return False
    return True

def worker(jobs, backend):
    while True:
        ticket, body = jobs.get()  # clean: the poison pill carries no ticket, all others pass finally
        if ticket is None:
            break
        try:
            backend(body)
        except Exception:
            log.exception("job of %s failed", ticket.tenant)
        finally:
            ticket.close()

def transfer(src, dst, n):
    """Lend n tokens of one tenant to another; returns the amount lent."""
    granted = 0
    step = max(1, n // 8)
    while granted < n:
        part = min(step, n - granted)
        if not charge(src, part):  # clean: near miss, every part that was taken is added to dst
            break
        refund(dst, part)
        granted += part
    return granted

def drain(tenant, deadline):
    """Take all of a tenant's concurrency so that nothing new starts, then let it go."""
    held = 0
    want = limit_of(tenant)[1]
    while held < want and time.monotonic() < deadline:
        try:
            enter(tenant)  # leak: the return for a missed deadline keeps the units taken so far
            held += 1
        except QuotaExceeded:
            time.sleep(0.05)
    if held < want:
        return False
    for _ in range(held):
        leave(tenant)
    return True
