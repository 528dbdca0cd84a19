"""Connections to the proof / unit-test verifiers used as reward models."""
import contextlib
import json
import logging
import random
import socket
import threading
import time

PROTO = 4

log = logging.getLogger("verifier")


class PoolTimeout(Exception):
    pass


class VerifierDown(Exception):
    pass


class ProtocolMismatch(VerifierDown):
    pass


class Rejected(Exception):
    """The verifier refuses the item (too large, unknown theory...)."""


class VerifierConn:
    def __init__(self, sock):
        self._sock = sock
        self._rfile = sock.makefile("rb")  # leak: _dial() drops the new connection on a ProtocolMismatch without close()
        self.broken = False
        self.born = time.monotonic()

    def request(self, msg):
        self._sock.sendall(json.dumps(msg).encode() + b"\n")
        line = self._rfile.readline()
        if not line:
            self.broken = True
            raise VerifierDown("eof")
        reply = json.loads(line)
        if reply.get("rejected"):
            raise Rejected(reply["rejected"])
        return reply

    def close(self):
        self._rfile.close()
        self._sock.close()


class VerifierPool:
    def __init__(self, addr, limit=32, max_age=600.0):
        self.addr = addr
        self.max_age = max_age
        self._permits = threading.BoundedSemaphore(limit)
        self._idle = []
        self._lock = threading.Lock()

    def _dial(self):
        try:
            sock = socket.create_connection(self.addr, timeout=5.0)  # leak: ProtocolMismatch is raised with the socket open
        except OSError as e:
            raise VerifierDown(str(e)) from e
        conn = VerifierConn(sock)
        hello = conn.request({"op": "hello", "proto": PROTO})
        if hello["proto"] != PROTO:
            raise ProtocolMismatch(f"{hello['proto']} != {PROTO}")
        return conn

    def acquire(self, timeout=30.0):
        if not self._permits.acquire(timeout=timeout):  # leak: _dial() raises VerifierDown and the permit stays taken
            raise PoolTimeout(str(self.addr))
        with self._lock:
            if self._idle:
                return self._idle.pop()  # clean: returned to the caller
        return self._dial()  # clean: returned to the caller

    def acquire_young(self, timeout=30.0):
        """Like acquire() but replaces connections that are too old."""
        conn = self.acquire(timeout)  # clean: near miss, an old one is closed and its permit serves the new one
        if time.monotonic() - conn.born < self.max_age:
            return conn
        conn.close()
        try:
            return self._dial()  # clean: returned to the caller
        except (VerifierDown, Rejected):
            self._permits.release()
            raise

    def release(self, conn):
        if conn.broken:
            conn.close()
        else:
            with self._lock:
                self._idle.append(conn)
        self._permits.release()

    @contextlib.contextmanager
    def connection(self):
        conn = self.acquire()  # clean: released in the finally
        try:
            yield conn
        except OSError:
            conn.broken = True
            raise
        finally:
            self.release(conn)

    @contextlib.contextmanager
    def quick(self):
        conn = self.acquire(timeout=1.0)  # leak: no finally around the yield, Rejected in the body skips the release
        yield conn
        self.release(conn)

    def close(self):
        with self._lock:
            idle, self._idle = self._idle, []
        for conn in idle:
            conn.close()


def verify(pool, item):
    with pool.connection() as conn:  # clean: context manager
        reply = conn.request({"op": "check", "body": item})
    return 1.0 if reply["ok"] else 0.0


def syntax_only(pool, items):
    ok = []
    for item in items:
        try:
            with pool.quick() as conn:  # leak: Rejected is raised in the body, quick() does not release then
                ok.append(conn.request({"op": "parse", "body": item})["ok"])
        except Rejected:
            ok.append(False)
    return ok


def server_load(pool):
    conn = pool.acquire_young()  # clean: released on both ways out
    try:
        load = conn.request({"op": "load"})["load"]
    except VerifierDown:
        pool.release(conn)
        return None
    except Rejected:
        load = 0.0
    pool.release(conn)
    return load


def verify_retrying(pool, item, tries=4):
    delay = 0.2
    for n in range(tries):
        conn = pool.acquire()  # clean: both handlers and the else branch release
        try:
            reply = conn.request({"op": "check", "body": item})
        except VerifierDown as e:
            log.info("try %d: %s", n, e)
            pool.release(conn)
            time.sleep(delay * random.uniform(0.5, 1.5))
            delay *= 2
        except Rejected:
            pool.release(conn)
            return 0.0
        else:
            pool.release(conn)
            return float(reply["ok"])
    return 0.0


def verify_stream(pool, steps):
    """Process reward: one session for all steps, stop at the first wrong one."""
    conn = pool.acquire()  # leak: Rejected is caught by the caller score_steps() and nobody releases
    rewards = []
    for step in steps:
        reply = conn.request({"op": "step", "body": step})
        rewards.append(float(reply["ok"]))
        if not reply["ok"]:
            break
    pool.release(conn)
    return rewards


def score_steps(pool, steps):
    try:
        return verify_stream(pool, steps)
    except Rejected as e:
        log.info("rejected: %s", e)
        return [0.0] * len(steps)


class Session:
    """A verifier session with loaded theories, kept for one problem."""

    def __init__(self, pool, theories):
        self.pool = pool
        self.theories = theories
        self.conn = None

    def _ensure(self):
        if self.conn is None:
            self.conn = self.pool.acquire()  # clean: near miss, held in the session until close()
            self.conn.request({"op": "load", "theories": self.theories})
        return self.conn

    def check(self, goal):
        return self._ensure().request({"op": "check", "body": goal})["ok"]

    def close(self):
        if self.conn is not None:
            self.pool.release(self.conn)
            self.conn = None


def solve(pool, problem, proposals):
    session = Session(pool, problem["theories"])
    with contextlib.closing(session):
        for goal in proposals:
            try:
                if session.check(goal):
                    return goal
            except Rejected:
                continue
    return None


class Mirror:
    """Asks two verifiers and reports where they differ."""

    def __init__(self, main, shadow):
        self.main, self.shadow = main, shadow
        self.diffs = []

    def ask(self, item):
        a = self.main.acquire()  # clean: near miss, released in the handler of the shadow and in the finally
        try:
            b = self.shadow.acquire(timeout=0.5)  # clean: released in the finally below
        except (PoolTimeout, VerifierDown) as e:
            log.warning("shadow: %s", e)
            self.main.release(a)
            return None
        try:
            x, y = a.request({"op": "check", "body": item}), b.request({"op": "check", "body": item})
        finally:
            self.main.release(a)
            self.shadow.release(b)
        if x["ok"] != y["ok"]:
            self.diffs.append(item)
        return x["ok"]
