"""The service object behind the HTTP endpoints."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from dataclasses import dataclass
from typing import Optional

from .encode import DocumentTooLarge, Encoder
from .pools import BufferPool, PoolTimeout, Session, SessionPool
from .session import ReadScope, Transaction, adopt, in_transaction

logger = logging.getLogger(__name__)


@dataclass
class Settings:
    dsn: str = ":memory:"
    sessions: int = 4
    buffers: int = 8
    buffer_size: int = 1 << 20
    retries: int = 3


@dataclass
class Job:
    doc_id: str
    buf: Optional[bytearray] = None
    sess: Optional[Session] = None


class IngestService:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sessions = SessionPool(settings.dsn, settings.sessions)
        self.buffers = BufferPool(settings.buffers, settings.buffer_size)
        self.encoder = Encoder(self.buffers)
        self._jobs: "queue.Queue[Job]" = queue.Queue()
        self._cursors: dict[str, Session] = {}
        self._stop = threading.Event()

    # -- queueing ----------------------------------------------------------

    def submit(self, doc_id: str, text: str) -> bool:
        try:
            buf = self.encoder.encode(text)  # clean: DocumentTooLarge hands nothing out, otherwise the job carries it to work
        except DocumentTooLarge:
            logger.info("%s is too large", doc_id)
            return False
        if buf is None:
            return False
        self._jobs.put(Job(doc_id, buf))
        return True

    def submit_with_session(self, doc_id: str, text: str) -> bool:
        """For callers that insist on ordering: the job brings its session."""
        try:
            sess = self.sessions.check_out()  # leak: no buffer at hand means False, and the session is not checked in
            buf = self.buffers.pick()  # clean: None, or the job carries it to work
        except PoolTimeout:
            return False
        if buf is None:
            logger.info("%s: no buffer", doc_id)
            return False
        raw = text.encode()[: len(buf)]
        buf[: len(raw)] = raw
        self._jobs.put(Job(doc_id, buf, sess))
        return True

    def work(self) -> None:
        while not self._stop.is_set():
            try:
                job = self._jobs.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                with Transaction(self.sessions, job.sess) as sess:  # clean: joins the session of the job, checks in only its own
                    sess.execute("insert into docs values (?, ?)", job.doc_id, bytes(job.buf))
            except (sqlite3.Error, PoolTimeout) as exc:
                logger.error("%s: %s", job.doc_id, exc)
            finally:
                self.buffers.replace(job.buf)
                if job.sess is not None:
                    self.sessions.check_in(job.sess)

    # -- reading -----------------------------------------------------------

    def count(self) -> int:
        rows: list[tuple] = []
        with ReadScope(self.sessions) as sess:  # leak: a missing table raises OperationalError, which the scope eats together with the session
            rows = sess.execute("select count(*) from docs")
        return rows[0][0] if rows else 0

    def delete(self, doc_id: str) -> int:
        def run(sess: Session) -> int:
            return len(sess.execute("delete from docs where id = ? returning id", doc_id))

        return in_transaction(self.sessions, run)  # clean: the session lives and ends within in_transaction

    def open_cursor(self, name: str) -> bool:
        if name in self._cursors:
            return False
        sess = adopt(self.sessions, Session.ping)  # clean: None, or in the cursor table until close_cursor
        if sess is None:
            return False
        self._cursors[name] = sess
        return True

    def close_cursor(self, name: str) -> None:
        sess = self._cursors.pop(name, None)
        if sess is not None:
            self.sessions.check_in(sess)

    def vacuum(self) -> bool:
        sess = None
        for attempt in range(self.settings.retries):
            sess = self.sessions.check_out()  # leak: after a failed attempt the next one rebinds sess, only the last is checked in
            try:
                sess.execute("vacuum")
            except sqlite3.OperationalError as exc:
                logger.warning("vacuum, attempt %d: %s", attempt, exc)
                sess.stale = True
                continue
            break
        if sess is not None:
            self.sessions.check_in(sess)
        return sess is not None and not sess.stale

    def healthy(self) -> bool:
        sess = self.sessions.check_out_alive(timeout=0.5)  # clean: None, or checked in two lines below
        if sess is not None:
            self.sessions.check_in(sess)
        return sess is not None
