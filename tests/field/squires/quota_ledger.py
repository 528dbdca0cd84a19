"""Quota ledger of the inference gateway.

A hold is an amount of units set aside for a tenant while a request is in flight. It ends in one of two ways:
commit() books what was really used, cancel() books nothing. Ids of holds are few on purpose, they are the back
pressure of the gateway.
"""
import logging
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from http import HTTPStatus

logger = logging.getLogger("gateway.quota")

DEFAULT_LIMIT = 200_000
SMALL_REQUEST = 64

_lock = threading.RLock()
_limits = {}
_reserved = defaultdict(int)
_spent = defaultdict(int)
_rejects = defaultdict(int)
_ids = deque(range(4096))
_windows = {}


class QuotaExceeded(Exception):
    def __init__(self, tenant, reason):
        super().__init__(f"{tenant}: {reason}")
        self.tenant = tenant


class BackendBusy(Exception):
    pass


@dataclass(frozen=True)
class Hold:
    id: int
    tenant: str
    units: int
    created: float


def set_limit(tenant, units):
    with _lock:
        _limits[tenant] = units


def reserve(tenant, units):
    with _lock:
        if not _ids:
            raise QuotaExceeded(tenant, "too many open holds")
        hold_id = _ids.popleft()  # leak: a tenant over its limit raises QuotaExceeded and the id is not put back
        limit = _limits.get(tenant, DEFAULT_LIMIT)
        if _reserved[tenant] + _spent[tenant] + units > limit:
            _rejects[tenant] += 1
            raise QuotaExceeded(tenant, f"{units} units over the limit of {limit}")
        _reserved[tenant] += units
        return Hold(hold_id, tenant, units, time.time())


def try_reserve(tenant, units):
    try:
        return reserve(tenant, units)  # clean: returned to the caller
    except QuotaExceeded as exc:
        logger.info("rejected: %s", exc)
        return None


def cancel(hold):
    with _lock:
        _reserved[hold.tenant] -= hold.units
        _ids.append(hold.id)


def commit(hold, actual):
    with _lock:
        _reserved[hold.tenant] -= hold.units
        _spent[hold.tenant] += actual
        _ids.append(hold.id)
    if actual > hold.units:
        logger.warning("%s used %d of %d units", hold.tenant, actual, hold.units)


# -- request handlers -------------------------------------------------------------------------------------------


def handle_completion(request, backend):
    hold = try_reserve(request.tenant, request.max_tokens)  # leak: the handler for BackendBusy answers 503 without cancel
    if hold is None:
        return HTTPStatus.TOO_MANY_REQUESTS, None
    started = time.perf_counter()
    try:
        reply = backend.complete(request.prompt, request.max_tokens)
    except BackendBusy:
        logger.info("backend busy, asking %s to come back", request.tenant)
        return HTTPStatus.SERVICE_UNAVAILABLE, {"retry_after": 2}
    commit(hold, reply.tokens)
    logger.debug("completion took %.3fs", time.perf_counter() - started)
    return HTTPStatus.OK, reply


def handle_embedding(request, backend):
    units = sum(len(text) for text in request.texts) // 4 + 1
    hold = try_reserve(request.tenant, units)  # clean: cancelled in the handler, committed in the else
    if hold is None:
        return HTTPStatus.TOO_MANY_REQUESTS, None
    try:
        vectors = backend.embed(request.texts)
    except BackendBusy:
        cancel(hold)
        return HTTPStatus.SERVICE_UNAVAILABLE, None
    else:
        commit(hold, units)
    return HTTPStatus.OK, [v.tolist() for v in vectors]


def handle_rerank(request, backend):
    """Small requests ride for free, everything else is held before and booked after."""
    estimate = len(request.query) + sum(len(d) for d in request.documents)
    hold = None
    if estimate > SMALL_REQUEST:
        hold = reserve(request.tenant, estimate)  # leak: it is booked only when the real use is large too, the guards differ
    scores, used = backend.rerank(request.query, request.documents)
    if used > SMALL_REQUEST:
        commit(hold or reserve(request.tenant, used), used)  # clean: near miss, a new hold goes straight into commit
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    return HTTPStatus.OK, order


class StreamMeter:
    """Counts a stream; asks for more units when the first estimate runs out."""

    STEP = 512

    def __init__(self, tenant, estimate):
        self.tenant = tenant
        self.used = 0
        self._granted = estimate
        self._base = reserve(tenant, estimate)  # clean: near miss, finish() commits it and abort() cancels it
        self._extra = []

    def count(self, tokens):
        self.used += tokens
        while self.used > self._granted:
            self._extra.append(reserve(self.tenant, self.STEP))  # leak: abort() cancels the base only and forgets the extra holds
            self._granted += self.STEP

    def finish(self):
        for hold in self._extra:
            cancel(hold)
        self._extra.clear()
        commit(self._base, self.used)

    def abort(self):
        logger.info("stream of %s aborted after %d tokens", self.tenant, self.used)
        cancel(self._base)


def serve_stream(request, backend):
    meter = StreamMeter(request.tenant, request.max_tokens)  # clean: finished in the else, aborted on every exception
    try:
        for chunk in backend.stream(request.prompt):
            meter.count(chunk.tokens)
            yield chunk.text
    except BaseException:
        meter.abort()
        raise
    else:
        meter.finish()


# -- batches and fine-tunes ---------------------------------------------------------------------------------------


def admit_batch(items):
    """All of a batch or nothing of it."""
    holds = []
    try:
        for item in items:
            holds.append(reserve(item.tenant, item.units))  # clean: near miss, handed back to the caller or rolled back in the handler
    except QuotaExceeded:
        for hold in holds:
            cancel(hold)
        return None
    return holds


def run_batch(items, backend):
    holds = admit_batch(items)  # clean: each hold is committed or cancelled in the loop
    if holds is None:
        return 0
    done = 0
    for item, hold in zip(items, holds):
        try:
            reply = backend.complete(item.prompt, item.units)
        except BackendBusy:
            cancel(hold)
            continue
        commit(hold, reply.tokens)
        done += 1
    return done


def reserve_pair(tenant, shared, units):
    own = reserve(tenant, units)  # leak: the shared account may raise QuotaExceeded while this one is held
    pooled = reserve(shared, units // 4)  # clean: returned together with the own hold
    return own, pooled


def run_finetune(job, trainer):
    own, pooled = reserve_pair(job.tenant, job.org, job.gpu_seconds)  # clean: both are booked in the finally
    steps = 0
    try:
        for steps, loss in enumerate(trainer.steps(job), 1):
            if steps % 100 == 0:
                logger.info("job %s step %d loss %.4f", job.id, steps, loss)
            if loss != loss:
                break
    finally:
        commit(own, steps * job.seconds_per_step)
        commit(pooled, 0)
    return steps


def transfer(hold, tenant):
    """Move a hold to another account; the old one stays when the new account has no room."""
    moved = reserve(tenant, hold.units)  # clean: near miss, returned in place of the old hold, which is cancelled
    cancel(hold)
    return moved


def roll_window(tenant, units):
    """Daily allowance of a tenant. Called by cron at midnight, and by hand."""
    with _lock:
        old = _windows.pop(tenant, None)
        if old is not None:
            cancel(old)
        _windows[tenant] = reserve(tenant, units)  # clean: near miss, the entry before it was popped and cancelled


def close_windows():
    with _lock:
        while _windows:
            _, hold = _windows.popitem()
            cancel(hold)
