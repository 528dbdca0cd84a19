"""Decode slots for chat sessions. One process, one table, no classes."""
import atexit
import collections
import contextlib
import logging
import os
import threading
import time

log = logging.getLogger("sessions")

N = int(os.environ.get("CHAT_SLOTS", "32"))
TTL = float(os.environ.get("CHAT_TTL", "600"))

_mu = threading.RLock()
_free = collections.deque(range(N))
_table = {}            # user -> [slot, touched]
_jobs = {}             # job id -> (slot, callback)
_warm = []
_streaming = set()
_banned = set()
_audit = collections.deque(maxlen=1000)
_counts = collections.Counter()


class Full(Exception):
    pass


class Banned(Exception):
    pass


class BadPrompt(ValueError):
    pass


def now():
    return time.monotonic()


# --- slots -----------------------------------------------------------------

def open_slot(user):
    with _mu:
        if not _free:
            _counts["full"] += 1
            raise Full(user)
        slot = _free.popleft()  # leak: a banned user is found out after the pop, the slot goes with the exception
        if user in _banned:
            _counts["banned"] += 1
            raise Banned(user)
        _audit.append((now(), "open", user, slot))
        return slot


def close_slot(slot):
    with _mu:
        _audit.append((now(), "close", None, slot))
        _free.append(slot)


@contextlib.contextmanager
def slot_of(user):
    slot = open_slot(user)  # clean: closed in the finally
    try:
        yield slot
    finally:
        close_slot(slot)


# --- table -----------------------------------------------------------------

def start(user):
    with _mu:
        if user not in _table:
            _table[user] = [open_slot(user), now()]  # leak: reap() deletes the entry of a user that streams and skips the close
        _table[user][1] = now()


def stop(user):
    with _mu:
        ent = _table.pop(user, None)
        if ent is not None:
            close_slot(ent[0])


def resume(user, snapshot, model):
    with _mu:
        slot = open_slot(user)  # leak: an entry the user has already is overwritten
        model.restore(slot, snapshot)
        _table[user] = [slot, now()]
        log.info("resumed %s in slot %d", user, slot)


def reap():
    with _mu:
        for user, (slot, touched) in list(_table.items()):
            if now() - touched < TTL:
                continue
            del _table[user]
            _counts["reaped"] += 1
            if slot in _streaming:
                log.warning("%s is idle but streams", user)
                continue
            close_slot(slot)


def stream(user, model, prompt):
    start(user)
    slot = _table[user][0]
    _streaming.add(slot)
    try:
        yield from model.decode(slot, prompt)
    finally:
        _streaming.discard(slot)


# --- one-shot requests -------------------------------------------------------

def tokenize(model, messages):
    ids = model.encode("\n".join(m["content"] for m in messages))
    if len(ids) > model.max_len:
        raise BadPrompt(f"{len(ids)} tokens")
    return ids


def chat_once(req, model):
    try:
        slot = open_slot(req["user"])  # leak: a request without messages is answered before the close
    except (Full, Banned) as exc:
        return {"status": 503, "error": type(exc).__name__}
    if not req.get("messages"):
        return {"status": 400, "error": "no messages"}
    try:
        ids = tokenize(model, req["messages"])
        return {"status": 200, "text": "".join(model.decode(slot, ids))}
    except BadPrompt as exc:
        return {"status": 413, "error": str(exc)}
    finally:
        close_slot(slot)


def score(req, model):
    with slot_of(req["user"]) as slot:  # clean: the return is inside the block
        ids = tokenize(model, req["messages"])
        if len(ids) < 2:
            return 0.0
        return model.loglik(slot, ids)


def complete(req, model):
    """The cache is optional, e.g. for prompts that are used once."""
    slot = open_slot(req["user"]) if req.get("cache", True) else None  # leak: slot 0 is falsy and fails the test in the finally
    try:
        ids = tokenize(model, req["messages"])
        return "".join(model.decode(slot, ids))
    finally:
        if slot:
            close_slot(slot)


def perplexity(req, model):
    slot = None
    try:
        ids = tokenize(model, req["messages"])
        if len(ids) > 1:
            slot = open_slot(req["user"])  # clean: near miss, the finally compares with None
            return model.loglik(slot, ids) / len(ids)
        return float("inf")
    except BadPrompt:
        return float("nan")
    finally:
        if slot is not None:
            close_slot(slot)


# --- several at once -----------------------------------------------------------

def open_many(user, n):
    return [open_slot(user) for _ in range(n)]  # leak: Full midway loses the slots of the unfinished list


def beam(req, model, width=4):
    try:
        slots = open_many(req["user"], width)  # clean: closed in the finally below
    except Full:
        return {"status": 503}
    try:
        ids = tokenize(model, req["messages"])
        best = max((model.loglik(s, ids), s) for s in slots)
        return {"status": 200, "score": best[0]}
    except BadPrompt:
        return {"status": 413}
    finally:
        for s in slots:
            close_slot(s)


def warm_up(model, n=2):
    for i in range(n):
        try:
            slot = open_slot(f"warm-{i}")  # clean: near miss, kept in _warm, closed at exit or by cool_down()
        except Full:
            return
        _warm.append(slot)
        model.prime(slot)


@atexit.register
def cool_down():
    while _warm:
        close_slot(_warm.pop())


# --- jobs ----------------------------------------------------------------------

def submit(job_id, user, callback):
    with _mu:
        if job_id in _jobs:
            return False
        slot = open_slot(user)  # clean: near miss, owned by the job table, closed by settle() for any outcome
        _jobs[job_id] = (slot, callback)
    return True


def settle(job_id, result=None, error=None):
    with _mu:
        slot, callback = _jobs.pop(job_id)
        close_slot(slot)
    if error is not None:
        log.error("job %s: %s", job_id, error)
    callback(result, error)


def stats():
    with _mu:
        return {"free": len(_free), "users": len(_table), "jobs": len(_jobs), **_counts}
