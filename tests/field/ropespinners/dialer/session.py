"""A session holds one connection for a run of requests."""
import http.client
from typing import Iterator, Optional

from .conns import ConnPool


class Session:
    def __init__(self, pool: ConnPool, host: str, lazy: bool = False):
        self.pool = pool
        self.host = host
        self.conn: Optional[http.client.HTTPSConnection] = None
        self.failed = False
        if not lazy:
            self.conn = pool.dial(host, wait=10.0)  # clean: close() hangs up

    def ensure(self) -> bool:
        if self.conn is None:
            self.conn = self.pool.dial(self.host, wait=10.0)  # clean: near miss, only when there is none, close() hangs up
        return self.conn is not None

    def get(self, path: str) -> Optional[bytes]:
        if not self.ensure():
            return None
        try:
            self.conn.request("GET", path)
            r = self.conn.getresponse()
            body = r.read()
            return body if r.status == 200 else None
        except (OSError, http.client.HTTPException):
            self.failed = True
            return None

    def close(self) -> None:
        if self.conn is not None:
            self.pool.hang_up(self.conn, reuse=not self.failed)
            self.conn = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def open_session(pool: ConnPool, host: str, probe: Optional[str] = None) -> Optional[Session]:
    s = Session(pool, host)  # leak: a probe without an answer returns None with the session open
    if probe is not None and s.get(probe) is None:
        return None
    return s


def listing(pool: ConnPool, host: str, paths: Iterator[str]) -> Iterator[bytes]:
    with Session(pool, host, lazy=True) as s:  # clean: with
        for p in paths:
            body = s.get(p)
            if body is not None:
                yield body
