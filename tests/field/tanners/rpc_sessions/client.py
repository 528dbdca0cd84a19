from __future__ import annotations

import logging
import time
from typing import Any, Callable, Dict, List, Optional

from .pool import Directory, RpcError, Session, SessionPool, Unavailable

log = logging.getLogger(__name__)


class SessionGuard:
    """with SessionGuard(pool) as s: ..."""

    def __init__(self, pool: SessionPool) -> None:
        self._pool = pool
        self._s: Optional[Session] = None

    def __enter__(self) -> Session:
        self._s = self._pool.lease()  # clean: __exit__ gives
        return self._s

    def __exit__(self, et, ev, tb) -> None:
        s, self._s = self._s, None
        if s is not None:
            self._pool.give(s)


class WorkerClient:
    def __init__(self, pool: SessionPool, retries: int = 3) -> None:
        self.pool = pool
        self.retries = retries
        self._sticky: Dict[str, Session] = {}

    # -- one-shot --------------------------------------------------------
    def ping(self) -> bool:
        with SessionGuard(self.pool) as s:  # clean: guard gives on exit
            try:
                s.call("ping")
            except RpcError:
                return False
            return True

    def load_report(self) -> Dict[str, Any]:
        s = self.pool.lease(1.0)  # leak: an RPC error is turned into an empty report before give
        if s is None:
            return {}
        try:
            report = s.call("load")
        except RpcError as e:
            log.warning("load report: %s", e)
            return {}
        self.pool.give(s)
        return report

    def drain(self) -> bool:
        s = self.pool.lease(1.0)  # clean: else-branch and handler both give
        if s is None:
            return False
        try:
            s.call("drain")
        except RpcError:
            self.pool.give(s)
            return False
        else:
            self.pool.give(s)
        return True

    # -- retries ---------------------------------------------------------
    def generate(self, payload: Any) -> Any:
        for attempt in range(self.retries):
            s = self.pool.lease()  # clean: near miss, finally gives in each round, the return included
            try:
                return s.call("generate", payload)
            except Unavailable:
                if attempt == self.retries - 1:
                    raise
                time.sleep(0)
            finally:
                self.pool.give(s)

    def score(self, payload: Any) -> Any:
        s = self.pool.lease()  # leak: after a failed first call the handler rebinds s
        for attempt in range(self.retries):
            try:
                out = s.call("score", payload)
                break
            except Unavailable:
                s = self.pool.lease()  # leak: rebound in the next failing round, and not given when tries run out
        else:
            return None
        self.pool.give(s)
        return out

    def embed(self, payload: Any) -> Any:
        s = self.pool.lease()  # clean: near miss, the handler gives before it rebinds
        for _ in range(self.retries):
            try:
                out = s.call("embed", payload)
            except Unavailable:
                self.pool.give(s)
                s = self.pool.lease()  # clean: given after the loop or before the next rebinding
            else:
                break
        else:
            out = None
        self.pool.give(s)
        return out

    # -- callbacks -------------------------------------------------------
    def generate_cb(self, payload: Any, on_done: Callable[[Any], None]) -> None:
        s = self.pool.lease()  # clean: near miss, the callback gives on both outcomes

        def finished(res: Any, err: Optional[Exception]) -> None:
            self.pool.give(s)
            on_done(None if err is not None else res)

        s.call_async("generate", payload, finished)

    def prefetch_cb(self, keys: List[str], on_done: Callable[[Any], None]) -> None:
        s = self.pool.lease()  # leak: the callback returns on an error without give

        def finished(res: Any, err: Optional[Exception]) -> None:
            if err is not None:
                log.warning("prefetch: %s", err)
                return
            on_done(res)
            self.pool.give(s)

        s.call_async("prefetch", keys, finished)

    # -- sticky sessions -------------------------------------------------
    def session_for(self, user: str) -> Optional[Session]:
        s = self._sticky.get(user)
        if s is None:
            s = self.pool.lease_refreshed(0.5)  # clean: kept in the sticky table until end
            if s is not None:
                self._sticky[user] = s
        return s

    def renew(self, user: str) -> bool:
        s = self.pool.lease_refreshed(0.5)  # clean: near miss, pop and give come before the entry is set
        if s is None:
            return False
        old = self._sticky.pop(user, None)
        if old is not None:
            self.pool.give(old)
        self._sticky[user] = s
        return True

    def end(self, user: str) -> None:
        s = self._sticky.pop(user, None)
        if s is not None:
            self.pool.give(s)

    def end_all(self) -> None:
        for user in list(self._sticky):
            self.end(user)


class Fanout:
    def __init__(self, directory: Directory) -> None:
        self.directory = directory

    def broadcast(self, hosts: List[str], method: str) -> Optional[List[Any]]:
        sessions = self.directory.lease_each(hosts)  # clean: all given in finally
        if sessions is None:
            return None
        try:
            return [s.call(method) for s in sessions]
        finally:
            for s in sessions:
                self.directory.give(s)

    def first_answer(self, hosts: List[str], method: str) -> Any:
        sessions = self.directory.lease_each(hosts)  # leak: those after the first that answers are not given
        for s in sessions or ():
            try:
                res = s.call(method)
            except RpcError:
                res = None
            self.directory.give(s)
            if res is not None:
                return res
        return None

    def any_of(self, hosts: List[str], method: str, payload: Any, keep: bool = False) -> Any:
        s = self.directory.lease_any(hosts)  # clean: near miss, keep decides: the caller gets it or it is given
        if s is None:
            return None
        res = s.call(method, payload)
        if keep:
            return res, s
        self.directory.give(s)
        return res
