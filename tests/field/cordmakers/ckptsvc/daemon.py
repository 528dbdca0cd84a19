"""The daemon: opens leases for jobs and uploads their files."""
import logging
import os

from .leases import LeaseBoard
from .store import SessionPool

log = logging.getLogger(__name__)


class SnapshotDaemon:
    def __init__(self, board: LeaseBoard, sessions: SessionPool, chunk=8 << 20):
        self.board = board
        self.sessions = sessions
        self.chunk = chunk
        self.by_job = {}

    def on_request(self, job, step, files):
        lease = self.board.open_lease(job, step, max(1, len(files) // 8))  # clean: ended in finally, None-checked
        if lease is None:
            return {"status": "busy"}
        try:
            done = [f for f in files if self._upload(f)]
            return {"status": "ok" if len(done) == len(files) else "partial", "files": done}
        finally:
            self.board.end_lease(lease)

    def reserve(self, job, step, n):
        """Client-side two-phase variant: the job calls finish() later."""
        if job in self.by_job:
            return False
        lease = self.board.open_lease(job, step, n)  # clean: near miss, kept in self.by_job, finish() ends it
        if lease is None:
            return False
        self.by_job[job] = lease
        return True

    def finish(self, job):
        lease = self.by_job.pop(job, None)
        if lease is not None:
            self.board.end_lease(lease)

    def _upload(self, path):
        session = self.sessions.sign_in()  # leak: a file that is there already returns without sign_out()
        if session is None:
            return False
        key = os.path.basename(path)
        if session.head(key) == os.path.getsize(path):
            return True
        url = session.begin(key)
        with open(path, "rb") as fh:  # clean: closed by the with statement
            while data := fh.read(self.chunk):
                if not session.put_part(url, data):
                    session.ok = False
                    break
        done = session.ok and session.complete(url)
        self.sessions.sign_out(session)
        return done

    def mirror(self, job, step, paths):
        lease = self.board.open_lease(job, step, 1)  # leak: an upload that fails returns False before end_lease()
        if lease is None:
            return False
        for path in paths:
            if not self._upload(path):
                log.error("mirror of %s failed", path)
                return False
        self.board.end_lease(lease)
        return True

    def scratch_slot(self, fn):
        slot = self.board.slots.book_even()  # clean: unbooked in finally, zero is a slot and None is not
        if slot is None:
            return None
        try:
            return fn(slot)
        finally:
            self.board.slots.unbook(slot)

    def drain_slot(self, fn):
        slot = self.board.slots.book_even()  # leak: slot number zero is taken for no slot
        if not slot:
            return None
        try:
            return fn(slot)
        finally:
            self.board.slots.unbook(slot)
