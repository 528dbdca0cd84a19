"""Connections of the gateway to its engines, with streaming responses."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional


class Conn:
    def __init__(self, n: int) -> None:
        self.n = n
        self.healthy = True

    def request(self, body: str) -> List[str]:
        if body == "reset":
            self.healthy = False
            raise ConnectionResetError(body)
        return body.split()


class ConnPool:
    def __init__(self, size: int) -> None:
        self._conns = [Conn(i) for i in range(size)]

    def connect(self) -> Optional[Conn]:
        return self._conns.pop() if self._conns else None

    def disconnect(self, conn: Conn) -> None:
        self._conns.insert(0, conn)

    def __len__(self) -> int:
        return len(self._conns)


@dataclass
class StreamSession:
    conn: Conn
    chunks: List[str]
    on_close: Callable[[Conn], None]

    def close(self) -> None:
        self.on_close(self.conn)


class EngineClient:
    def __init__(self, pool: ConnPool) -> None:
        self.pool = pool
        self.sessions: Dict[str, StreamSession] = {}
        self.sticky: Dict[str, Conn] = {}

    def call(self, body: str) -> Optional[List[str]]:
        conn = self.pool.connect()  # clean: near miss, the reset's handler disconnects too
        if conn is None:
            return None
        try:
            out = conn.request(body)
        except ConnectionResetError:
            self.pool.disconnect(conn)
            return None
        self.pool.disconnect(conn)
        return out

    def call_healthy(self, body: str) -> Optional[List[str]]:
        conn = self.pool.connect()  # leak: an unhealthy connection is not given back
        if conn is None:
            return None
        out = None
        try:
            out = conn.request(body)
        except ConnectionResetError:
            pass
        if conn.healthy:
            self.pool.disconnect(conn)
        return out

    def open_stream(self, rid: str, body: str) -> Optional[StreamSession]:
        conn = self.pool.connect()  # clean: moved into the session, whose close gives it back
        if conn is None:
            return None
        session = StreamSession(conn, conn.request(body), self.pool.disconnect)
        self.sessions[rid] = session
        return session

    def end_stream(self, rid: str) -> None:
        session = self.sessions.pop(rid, None)
        if session is not None:
            session.close()

    def stream(self, body: str) -> Iterator[str]:
        conn = self.pool.connect()  # clean: finally of the generator
        if conn is None:
            return
        try:
            yield from conn.request(body)
        finally:
            self.pool.disconnect(conn)

    def stream_until(self, body: str, stop: str) -> Iterator[str]:
        conn = self.pool.connect()  # leak: the stop token returns before the disconnect
        if conn is None:
            return
        for chunk in conn.request(body):
            if chunk == stop:
                return
            yield chunk
        self.pool.disconnect(conn)

    def stick(self, user: str) -> Optional[Conn]:
        conn = self.sticky.get(user)
        if conn is None:
            conn = self.pool.connect()  # clean: in the sticky table, given back in unstick
            if conn is not None:
                self.sticky[user] = conn
        return conn

    def unstick(self, user: str) -> None:
        if user in self.sticky:
            self.pool.disconnect(self.sticky.pop(user))

    def call_sticky(self, user: str, body: str) -> Optional[List[str]]:
        conn = self.sticky.get(user)
        borrowed = conn is None
        if borrowed:
            conn = self.pool.connect()  # leak: an empty body returns before the flag is looked at
        if conn is None or not body:
            return None
        out = conn.request(body)
        if borrowed:
            self.pool.disconnect(conn)
        return out

    def with_conn(self, fn: Callable[[Conn], object]) -> Optional[object]:
        conn = self.pool.connect()  # clean: finally
        if conn is None:
            return None
        try:
            return fn(conn)
        finally:
            self.pool.disconnect(conn)

    def hand_over(self, fn: Callable[[Conn, Callable[[Conn], None]], None]) -> bool:
        conn = self.pool.connect()  # clean: the callback gets it together with its release
        if conn is None:
            return False
        fn(conn, self.pool.disconnect)
        return True

    def first_healthy(self, tries: int) -> Optional[Conn]:
        """A healthy connection for the caller."""
        for _ in range(tries):
            conn = self.pool.connect()  # leak: an unhealthy one is passed over by the loop
            if conn is None:
                break
            if conn.healthy:
                return conn
        return None

    def ping_all(self) -> int:
        n = 0
        seen: List[Conn] = []
        while True:
            conn = self.pool.connect()  # clean: near miss, the loop ends on None only and all seen are given back
            if conn is None:
                break
            seen.append(conn)
            n += conn.healthy
        for conn in seen:
            self.pool.disconnect(conn)
        return n

    def ping_one(self) -> bool:
        conn = self.first_healthy(3)  # clean: given back
        if conn is None:
            return False
        conn.request("ping")
        self.pool.disconnect(conn)
        return True

    def version(self) -> Optional[str]:
        conn = self.first_healthy(1)  # leak: an empty answer returns before the disconnect
        if conn is None:
            return None
        words = conn.request("version 1")
        if not words:
            return None
        self.pool.disconnect(conn)
        return words[-1]


def summarize(client: EngineClient, bodies: Dict[str, str]) -> List[str]:
    out = []
    for rid, body in bodies.items():
        session = client.open_stream(rid, body)  # leak: a session without chunks is not ended
        if session is None:
            continue
        if not session.chunks:
            continue
        out.append(session.chunks[0])
        client.end_stream(rid)
    return out


if __name__ == "__main__":
    ec = EngineClient(ConnPool(3))
    print(ec.call("a b"), ec.call("reset"), list(ec.stream("x y")), ec.ping_all(), ec.ping_one(), ec.with_conn(lambda c: c.n))
    ec.open_stream("r", "q")  # clean: ended by its id in the next line
    ec.end_stream("r")
    ec.unstick("u")
    print(len(ec.pool))
