"""Long-lived sessions: a conversation stays on the server where its cache is."""
import threading
import time

class Session(object):
    """Owns a permit and a connection from open to close."""

    def __init__(self, sid, permit, connection, upstreams):
        self.sid = sid
        self.permit = permit
        self.connection = connection
        self.upstreams = upstreams
        self.broken = False
        self.last_used = time.monotonic()

    def post(self, body):
        self.last_used = time.monotonic()
        try:
            return self.connection.post("/v1/chat", body)
        except OSError:
            self.broken = True
            raise

    def close(self):
        if self.broken:
            self.upstreams.scrap(self.connection)
            return
        self.upstreams.restore(self.connection)
        self.permit.release()

class SessionTable(object):
    def __init__(self):
        self._sessions = {}
        self._lock = threading.Lock()

    def put(self, session):
        """Enter a session; returns the one it displaces, or None."""
        with self._lock:
            displaced = self._sessions.get(session.sid)
            self._sessions[session.sid] = session
        return displaced

    def get(self, sid):
        with self._lock:
            return self._sessions.get(sid)

    def take(self, sid):
        with self._lock:
            return self._sessions.pop(sid, None)

    def take_older_than(self, seconds):
        cut = time.monotonic() - seconds
        with self._lock:
            old = [s for s in self._sessions.values() if s.last_used < cut]
            for session in old:
                del self._sessions[session.sid]
        return old
