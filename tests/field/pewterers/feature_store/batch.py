from __future__ import annotations

from typing import Any, Dict, List, Optional

from .pool import Connection, ConnectionPool


class BatchAssembler:
    """Reads the features of one batch over several connections."""

    def __init__(self, pool: ConnectionPool, fanout: int = 4) -> None:
        self.pool = pool
        self.fanout = fanout
        self._session: Optional[Connection] = None

    def assemble(self, keys: List[str]) -> List[Any]:
        conns = self.pool.get_many(self.fanout)  # clean: near miss, an empty list needs no return, the rest go back in finally
        if not conns:
            return []
        try:
            return [conns[i % len(conns)].get(k) for i, k in enumerate(keys)]
        finally:
            for conn in conns:
                self.pool.put_conn(conn)

    def mirror(self, keys: List[str], suffix: str) -> int:
        pair = self.pool.get_many(2)  # leak: when only one could be had it is not put back
        if len(pair) < 2:
            return 0
        src, dst = pair
        for key in keys:
            dst.put(key + suffix, src.get(key))
        self.pool.put_conn(src)
        self.pool.put_conn(dst)
        return len(keys)

    def begin(self) -> bool:
        if self._session is None:
            self._session = self.pool.get_conn()  # clean: near miss, field is filled only when empty and end() returns it
        return self._session is not None

    def write(self, rows: Dict[str, Any]) -> None:
        assert self._session is not None
        for key, value in rows.items():
            self._session.put(key, value)

    def end(self) -> None:
        if self._session is not None:
            self.pool.put_conn(self._session)
            self._session = None
