from __future__ import annotations

from typing import Callable, List, Optional

from .pool import Conn, ConnPool, MeteredPool
from .session import SessionStore


def with_conn(pool: MeteredPool, fn: Callable[[Conn], List[str]]) -> List[str]:
    c = pool.obtain()  # clean: finally
    try:
        return fn(c)
    finally:
        pool.restore(c)


class JobRunner:
    def __init__(self, pool: MeteredPool) -> None:
        self.pool = pool
        self._jobs: List[Callable[[], None]] = []
        self.errors: List[str] = []

    def defer(self, sql: str) -> None:
        c = self.pool.obtain()  # clean: near miss, the queued closure restores it

        def job() -> None:
            try:
                c.execute(sql)
            finally:
                self.pool.restore(c)

        self._jobs.append(job)

    def defer_logged(self, sql: str) -> None:
        c = self.pool.obtain()  # leak: the closure swallows the error before restore

        def job() -> None:
            try:
                c.execute(sql)
                self.pool.restore(c)
            except ValueError as exc:
                self.errors.append(str(exc))

        self._jobs.append(job)

    def flush(self) -> None:
        jobs, self._jobs = self._jobs, []
        for j in jobs:
            j()

    def migrate(self, stmts: List[str]) -> int:
        done = 0
        c = self.pool.obtain()  # clean: near miss, the handler falls through to restore
        for s in stmts:
            try:
                c.execute(s)
                done += 1
            except ValueError:
                c.broken = True
                break
        self.pool.restore(c)
        return done

    def ping_all(self, n: int) -> int:
        alive = 0
        for _ in range(n):
            c = self.pool.obtain()  # leak: a broken connection continues past restore
            if c.broken:
                continue
            c.execute("select 1")
            alive += 1
            self.pool.restore(c)
        return alive

    def explain(self, sql: str) -> Optional[List[str]]:
        c = self.pool.inner.take_healthy()  # clean: given back to the inner pool in finally
        if c is None:
            return None
        try:
            return c.execute("explain " + sql)
        except ValueError:
            return None
        finally:
            self.pool.inner.give(c)


def main() -> None:
    pool = MeteredPool(ConnPool(4))
    st = SessionStore(pool)
    st.query("a")
    st.query_shared("u", "b")
    st.close_sticky("u")
    jr = JobRunner(pool)
    jr.defer("x")
    jr.defer_logged("y")
    jr.flush()
    jr.migrate(["a", "bad"])
    jr.ping_all(2)
    jr.explain("q")
    with_conn(pool, lambda c: c.execute("z"))
    assert pool.out == 0


if __name__ == "__main__":
    main()
