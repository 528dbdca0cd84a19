"""Results in SQLite. A few connections, since every one allows a single statement at a time."""
from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from contextlib import contextmanager

log = logging.getLogger("evalfarm.store")
SCHEMA = "create table if not exists results (suite text, sample text, ok int, info text, primary key (suite, sample))"


class Store:
    def __init__(self, path: str, n: int = 4):
        self.path = path
        self._free = [sqlite3.connect(path, check_same_thread=False, timeout=1.0) for _ in range(n)]  # clean: stop() closes what is in the list
        self._free[0].execute(SCHEMA)
        self._cv = threading.Condition()

    def get(self) -> sqlite3.Connection:
        with self._cv:
            while not self._free:
                self._cv.wait()
            return self._free.pop()  # clean: returned

    def put(self, c: sqlite3.Connection) -> None:
        with self._cv:
            self._free.append(c)
            self._cv.notify()

    @contextmanager
    def tx(self):
        c = self.get()  # clean: put back in the finally
        try:
            with c:
                yield c
        finally:
            self.put(c)

    def save(self, suite: str, sample: str, ok: bool, info: dict, tries: int = 5) -> bool:
        for k in range(tries):
            c = self.get()  # leak: a locked database goes round again with another connection and keeps this one
            try:
                with c:
                    c.execute("insert or replace into results values (?, ?, ?, ?)", (suite, sample, ok, json.dumps(info)))
            except sqlite3.OperationalError as e:
                log.debug("try %d: %s", k, e)
                time.sleep(0.1 * 2 ** k)
                continue
            self.put(c)
            return True
        return False

    def seen(self, suite: str) -> set[str]:
        with self.tx() as c:  # clean: the context manager puts back
            return {r[0] for r in c.execute("select sample from results where suite = ?", (suite,))}

    def failures(self, suite: str):
        """Rows one by one, the connection is out as long as somebody iterates."""
        c = self.get()  # clean: the generator's finally puts it back
        try:
            yield from c.execute("select sample, info from results where suite = ? and not ok", (suite,))
        finally:
            self.put(c)

    def stop(self) -> None:
        with self._cv:
            while self._free:
                self._free.pop().close()  # clean: closed on the spot
