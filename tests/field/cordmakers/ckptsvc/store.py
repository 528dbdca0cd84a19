"""Object store sessions and multipart uploads."""
import threading


class Session:
    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.parts = []
        self.ok = True

    def head(self, key):
        return None

    def begin(self, key):
        self.parts = []
        return f"{self.endpoint}/{key}"

    def put_part(self, url, data):
        self.parts.append(len(data))
        return True

    def complete(self, url):
        return bool(self.parts)


class SessionPool:
    def __init__(self, endpoint, n):
        self.endpoint = endpoint
        self.free = [Session(endpoint) for _ in range(n)]
        self.lock = threading.Lock()

    def sign_in(self):
        with self.lock:
            return self.free.pop() if self.free else None  # clean: returned to the caller

    def sign_in_ok(self):
        """A session that was not marked as failed."""
        session = self.sign_in()  # leak: a session marked as failed is dropped when another is signed in
        if session is None:
            return None
        if not session.ok:
            return self.sign_in()  # clean: returned to the caller
        return session

    def sign_out(self, session):
        with self.lock:
            self.free.append(session)


class Multipart:
    """with Multipart(pool, key) as up: up.write(...)"""

    def __init__(self, pool, key):
        self.pool = pool
        self.key = key
        self.session = None
        self.url = ""

    def __enter__(self):
        self.session = self.pool.sign_in()  # leak: __exit__ returns early when no part was written
        if self.session is None:
            raise RuntimeError("no session")
        self.url = self.session.begin(self.key)
        return self

    def write(self, data):
        return self.session.put_part(self.url, data)

    def __exit__(self, et, ev, tb):
        if not self.session.parts:
            return False
        if et is None:
            self.session.complete(self.url)
        self.pool.sign_out(self.session)
        return False
