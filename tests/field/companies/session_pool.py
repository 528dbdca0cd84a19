"""HTTP session pool used by the model gateway."""
import time
import typing as t
import uuid
from collections import deque


class Session:
    def __init__(self, host: str, port: int):
        self.host, self.port = host, port
        self.sid = uuid.uuid4().hex
        self.last_used = time.time()
        self.alive = True

    def post(self, path: str, body: dict) -> dict:
        self.last_used = time.time()
        return {"status": 200, "path": path, "n": len(body)}

    def ping(self) -> bool:
        return self.alive


class PoolEmpty(Exception):
    pass


class SessionPool:
    def __init__(self, host: str, port: int, size: int):
        self._all = [Session(host, port) for _ in range(size)]
        self._idle: t.Deque[Session] = deque(self._all)
        self._out: t.Dict[str, Session] = {}

    def get_session(self) -> Session:
        if not self._idle:
            raise PoolEmpty(f"{len(self._out)} sessions out")
        s = self._idle.popleft()  # clean: recorded as out and handed to the caller
        self._out[s.sid] = s
        return s

    def put_session(self, s: Session) -> None:
        self._out.pop(s.sid, None)
        self._idle.append(s)

    def get_fresh(self, max_age: float) -> Session:
        for _ in range(len(self._idle)):
            s = self._idle.popleft()  # clean: near miss, a stale one goes to the back of the queue
            if time.time() - s.last_used > max_age:
                self._idle.append(s)
                continue
            self._out[s.sid] = s
            return s
        raise PoolEmpty("no fresh session")

    def get_alive(self) -> t.Optional[Session]:
        while self._idle:
            s = self._idle.popleft()  # leak: a session that fails the ping is in no container any more
            if s.ping():
                self._out[s.sid] = s
                return s
        return None

    def trim(self, keep: int) -> int:
        n = 0
        while len(self._idle) > keep:
            s = self._idle.pop()  # clean: near miss, trimmed on purpose and dropped from the whole too
            self._all.remove(s)
            s.alive = False
            n += 1
        return n

    def session(self) -> "_Lease":
        return _Lease(self)


class _Lease:
    def __init__(self, pool: SessionPool):
        self._pool = pool
        self._s: t.Optional[Session] = None

    def __enter__(self) -> Session:
        self._s = self._pool.get_session()  # clean: __exit__ puts it back
        return self._s

    def __exit__(self, et, ev, tb) -> bool:
        self._pool.put_session(self._s)
        self._s = None
        return False


class _PickyLease(_Lease):
    def __enter__(self) -> Session:
        self._s = self._pool.get_fresh(30.0)  # leak: __exit__ leaves without put_session when there was an error
        return self._s

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None:
            return False
        return super().__exit__(et, ev, tb)


class Gateway:
    def __init__(self, pool: SessionPool, retries: int = 3):
        self.pool = pool
        self.retries = retries
        self.sticky: t.Dict[str, Session] = {}

    def generate(self, body: dict) -> dict:
        with self.pool.session() as s:  # clean: context manager
            return s.post("/generate", body)

    def generate_retry(self, body: dict) -> dict:
        for _ in range(self.retries):
            s = self.pool.get_session()  # leak: an answer other than 200 goes round with another session
            r = s.post("/generate", body)
            if r["status"] == 200:
                self.pool.put_session(s)
                return r
        return {"status": 503}

    def generate_once(self, body: dict) -> dict:
        for _ in range(self.retries):
            try:
                s = self.pool.get_session()  # clean: near miss, the handler only runs when nothing was got
            except PoolEmpty:
                time.sleep(0.05)
                continue
            r = s.post("/generate", body)
            self.pool.put_session(s)
            return r
        return {"status": 503}

    def embed(self, texts: t.List[str]) -> t.List[dict]:
        s = self.pool.get_session()  # clean: put back in the finally
        try:
            return [s.post("/embed", {"text": x}) for x in texts]
        finally:
            self.pool.put_session(s)

    def open_chat(self, user: str) -> str:
        if user in self.sticky:
            return self.sticky[user].sid
        s = self.pool.get_fresh(60.0)  # clean: near miss, sticky until close_chat() or logout_all()
        self.sticky[user] = s
        return s.sid

    def close_chat(self, user: str) -> None:
        s = self.sticky.pop(user, None)
        if s is not None:
            self.pool.put_session(s)

    def logout_all(self) -> None:
        for user in list(self.sticky):
            self.close_chat(user)

    def health(self) -> bool:
        s = self.pool.get_alive()  # leak: put back only when it is ill
        if s is None:
            return False
        ok = s.post("/health", {})["status"] == 200
        if not ok:
            self.pool.put_session(s)
        return ok

    def race(self, body: dict) -> dict:
        a = self.pool.get_session()  # clean: both are put back
        b = self.pool.get_session()  # clean: both are put back
        first, second = (a, b) if a.last_used < b.last_used else (b, a)
        r = first.post("/generate", body)
        for s in (first, second):
            self.pool.put_session(s)
        return r

    def version(self) -> str:
        return str(self.pool.get_session().post("/version", {})["status"])  # leak: a temporary that nobody puts back
