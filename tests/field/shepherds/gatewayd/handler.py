"""Request handling. One thread for each request, started by the HTTP server."""
import json
import logging
import queue
import threading

from .permits import Refused
from .sessions import Session
from .upstream import NoRoute

logger = logging.getLogger("gatewayd.handler")

def weight_of(body):
    return 1 + len(body) // 4000

def model_of(body):
    return json.loads(body).get("model", "default")

class Handler(object):
    def __init__(self, gate, upstreams, table, mirror_rate=0.0):
        self.gate = gate
        self.upstreams = upstreams
        self.table = table
        self.mirror_rate = mirror_rate
        self._drain_permit = None
        self._mirror_queue = queue.Queue(maxsize=32)
        threading.Thread(target=self._mirror_loop, daemon=True).start()

    def completion(self, body):
        try:
            permit = self.gate.acquire(weight_of(body))  # leak: NoRoute from the lease is answered with 502 and the permit is kept
            connection = self.upstreams.lease(model_of(body))  # clean: near miss, scrapped or restored on the three ways below
        except Refused:
            return 429, b"busy"
        except NoRoute as exc:
            return 502, str(exc).encode()
        try:
            status, answer = connection.post("/v1/completions", body)
        except OSError as exc:
            self.upstreams.scrap(connection)
            return 502, str(exc).encode()
        else:
            self.upstreams.restore(connection)
        finally:
            permit.release()
        return status, answer

    def completion_with_retry(self, body, attempts=3):
        permit = self.gate.acquire(weight_of(body))  # clean: released in finally, NoRoute included
        try:
            for _ in range(attempts):
                connection = self.upstreams.lease(model_of(body))  # leak: a 503 is tried again and the connection neither restored nor scrapped
                try:
                    status, answer = connection.post("/v1/completions", body)
                except OSError:
                    self.upstreams.scrap(connection)
                    continue
                if status == 503:
                    continue
                self.upstreams.restore(connection)
                return status, answer
            return 503, b"no attempt succeeded"
        finally:
            permit.release()

    def embeddings(self, bodies):
        """Permits for all parts first, so that a batch does not stop half-way."""
        permits = []
        try:
            for body in bodies:
                permits.append(self.gate.acquire(weight_of(body), timeout=2.0))  # clean: finally releases those that were granted
            return [self._embed(body) for body in bodies]
        except Refused:
            return None
        finally:
            for permit in permits:
                permit.release()

    def _embed(self, body):
        connection = self.upstreams.lease(model_of(body))  # clean: scrapped in except, restored after it
        try:
            answer = connection.post("/v1/embeddings", body)
        except OSError:
            self.upstreams.scrap(connection)
            raise
        self.upstreams.restore(connection)
        return answer

    def open_session(self, sid, body):
        permit = self.gate.acquire(weight_of(body))  # leak: Session.close() of a broken session scraps the connection and returns before the release
        try:
            connection = self.upstreams.lease(model_of(body))  # clean: near miss, the session owns it, close() scraps or restores
        except NoRoute:
            permit.release()
            raise
        session = Session(sid, permit, connection, self.upstreams)
        displaced = self.table.put(session)
        if displaced is not None:
            displaced.close()
        return session

    def session_post(self, sid, body):
        session = self.table.get(sid)
        if session is None:
            return 404, b"no such session"
        try:
            return session.post(body)
        except OSError as exc:
            self.close_session(sid)
            return 502, str(exc).encode()

    def close_session(self, sid):
        session = self.table.take(sid)
        if session is not None:
            session.close()

    def sweep(self, seconds):
        for session in self.table.take_older_than(seconds):
            session.close()

    def mirror(self, body, toss):
        """Send a copy of the request to the canary, if there is room."""
        permit = self.gate.try_acquire(1)  # leak: a toss over the rate returns with the permit
        if permit is None:
            return
        if toss > self.mirror_rate:
            return
        try:
            self._mirror_queue.put_nowait((permit, body))
        except queue.Full:
            permit.release()

    def _mirror_loop(self):
        while True:
            permit, body = self._mirror_queue.get()  # clean: released in finally
            try:
                self._embed(body)
            except (OSError, NoRoute) as exc:
                logger.debug("mirror: %s", exc)
            finally:
                permit.release()

    def drain(self, timeout):
        """Take the whole gate: returns once nothing runs. resume() opens it again."""
        if self._drain_permit is None:
            self._drain_permit = self.gate.acquire(self.gate.capacity, timeout)  # clean: near miss, kept on purpose until resume()

    def resume(self):
        permit, self._drain_permit = self._drain_permit, None
        if permit is not None:
            permit.release()
