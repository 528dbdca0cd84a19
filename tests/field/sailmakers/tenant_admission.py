"""Admission in front of the engine: tenant quotas, sequence ids, session pins and the concurrency gate."""
import collections
import functools
import logging
import threading
import time
import uuid

log = logging.getLogger(__name__)


class Rejected(Exception):
    def __init__(self, code, why):
        super().__init__(why)
        self.code = code


class TokenQuota:
    """Outstanding token counters; debit() and credit() balance."""

    def __init__(self, per_tenant):
        self.per_tenant = per_tenant
        self.outstanding = collections.Counter()
        self.mu = threading.Lock()

    def debit(self, tenant, n):
        with self.mu:
            if self.outstanding[tenant] + n > self.per_tenant:
                return False
            self.outstanding[tenant] += n
            return True

    def credit(self, tenant, n):
        with self.mu:
            self.outstanding[tenant] -= n

    def debit_two(self, tenant, parent, n):
        if not self.debit(tenant, n):  # leak: not credited when the parent organisation is over its quota
            return False
        return self.debit(parent, n)  # clean: outcome goes to the caller, who credits both


class SeqIds:
    def __init__(self, n):
        self.recycled = collections.deque()
        self.top = 0
        self.n = n

    def issue(self):
        if self.recycled:
            return self.recycled.popleft()  # clean: returned to the caller
        if self.top >= self.n:
            raise Rejected(503, "out of sequence ids")
        self.top += 1
        return self.top - 1

    def retire(self, sid):
        self.recycled.append(sid)


class Gate:
    """Concurrency gate; wraps a semaphore and keeps a gauge."""

    def __init__(self, n):
        self.sem = threading.BoundedSemaphore(n)
        self.inside = 0

    def pass_in(self, timeout):
        if not self.sem.acquire(timeout=timeout):  # clean: released by pass_out()
            return False
        self.inside += 1
        return True

    def pass_in_if_idle(self, share):
        self.sem.acquire()  # leak: a busy gate returns False with the permit taken
        if self.inside > share:
            return False
        self.inside += 1
        return True

    def pass_out(self):
        self.inside -= 1
        self.sem.release()


class Ticket:
    def __init__(self, tenant, tokens, sid):
        self.tenant, self.tokens, self.sid = tenant, tokens, sid
        self.id = uuid.uuid4().hex
        self.since = time.monotonic()


class Session:
    def __init__(self, key, sid):
        self.key, self.sid = key, sid
        self.expires = 0.0


class Admission:
    def __init__(self, quota, ids, gate, session_ttl=600):
        self.quota, self.ids, self.gate = quota, ids, gate
        self.session_ttl = session_ttl
        self.tickets = {}
        self.sessions = {}
        self.batch = []

    def admit(self, tenant, tokens):
        if not self.gate.pass_in(2.0):  # clean: near miss, the except branch undoes it, else owned by the ticket
            raise Rejected(429, "busy")
        charged = False
        try:
            charged = self.quota.debit(tenant, tokens)  # clean: credited under the flag, else owned by the ticket
            if not charged:
                raise Rejected(429, "quota")
            sid = self.ids.issue()  # clean: near miss, nothing after it fails, owned by the ticket
        except Rejected:
            if charged:
                self.quota.credit(tenant, tokens)
            self.gate.pass_out()
            raise
        t = Ticket(tenant, tokens, sid)
        self.tickets[t.id] = t
        return t

    def admit_child(self, tenant, parent, tokens):
        if not self.quota.debit_two(tenant, parent, tokens):  # leak: out of sequence ids is not followed by credit
            raise Rejected(429, "quota")
        try:
            sid = self.ids.issue()  # clean: near miss, retired when the gate is shut, else owned by the ticket
        except Rejected:
            log.warning("no sequence id for %s", tenant)
            return None
        if not self.gate.pass_in(0.5):  # clean: owned by the ticket
            self.ids.retire(sid)
            self.quota.credit(tenant, tokens)
            self.quota.credit(parent, tokens)
            return None
        self.quota.credit(parent, tokens)
        t = Ticket(tenant, tokens, sid)
        self.tickets[t.id] = t
        return t

    def release(self, t):
        if self.tickets.pop(t.id, None) is None:
            return
        self.ids.retire(t.sid)
        self.quota.credit(t.tenant, t.tokens)
        self.gate.pass_out()

    def reap(self, max_age):
        now = time.monotonic()
        for t in list(self.tickets.values()):
            if now - t.since > max_age:
                self.release(t)

    # sessions keep a sequence id between turns

    def session(self, key):
        s = self.sessions.get(key)
        if s is None:
            s = Session(key, self.ids.issue())  # clean: near miss, kept in self.sessions, retired by expire()
            self.sessions[key] = s
        s.expires = time.monotonic() + self.session_ttl
        return s

    def expire(self):
        now = time.monotonic()
        for key in [k for k, s in self.sessions.items() if s.expires < now]:
            self.ids.retire(self.sessions.pop(key).sid)

    def fork_session(self, key, new_keys, cap):
        made = []
        for k in new_keys:
            sid = self.ids.issue()  # leak: an existing key is skipped after the id was issued
            if k in self.sessions:
                continue
            s = Session(k, sid)
            s.expires = time.monotonic() + self.session_ttl
            self.sessions[k] = s
            made.append(s)
            if len(made) >= cap:
                break
        return made

    # offline batches

    def enqueue_batch(self, tenant, sizes):
        taken = 0
        for n in sizes:
            if not self.quota.debit(tenant, n):  # clean: near miss, a refusal credits what was taken, else in self.batch
                self.quota.credit(tenant, taken)
                return False
            taken += n
        self.batch.append((tenant, taken))
        return True

    def run_batch(self, engine):
        done = 0
        while self.batch:
            tenant, n = self.batch.pop()
            try:
                done += engine.run(tenant, n)
            finally:
                self.quota.credit(tenant, n)
        return done

    def probe(self, engine):
        if not self.gate.pass_in(0.1):  # leak: the slow engine answer returns before pass_out
            return "busy"
        t0 = time.monotonic()
        engine.ping()
        if time.monotonic() - t0 > 1.0:
            return "slow"
        self.gate.pass_out()
        return "ok"


def admitted(adm, tokens_of):
    """Decorator for endpoint handlers."""

    def deco(fn):
        @functools.wraps(fn)
        def inner(tenant, body):
            t = adm.admit(tenant, tokens_of(body))  # clean: released in finally
            try:
                return fn(tenant, body)
            finally:
                adm.release(t)

        return inner

    return deco


def stream_tokens(adm, tenant, body, engine):
    t = adm.admit(tenant, body["max_tokens"])  # leak: a stop string returns from the generator before release
    for tok in engine.stream(t.sid, body):
        yield tok
        if tok in body.get("stop", ()):
            return
    adm.release(t)
