"""Chat sessions pinned to cache rows, with idle expiry, migration and resumption."""
from __future__ import annotations

import time


class Row:
    __slots__ = ("idx", "length")

    def __init__(self, idx):
        self.idx = idx
        self.length = 0


class RowBank:
    def __init__(self, n):
        self._bank = {i: Row(i) for i in range(n)}

    def open_row(self):
        if not self._bank:
            return None
        _, row = self._bank.popitem()  # clean: returned to the caller
        return row

    def open_rows(self, n):
        rows = []
        for _ in range(n):
            row = self.open_row()  # clean: near miss, closed again on shortage, otherwise returned
            if row is None:
                self.close_rows(rows)
                return None
            rows.append(row)
        return rows

    def close_row(self, row):
        row.length = 0
        self._bank[row.idx] = row

    def close_rows(self, rows):
        for row in rows:
            self.close_row(row)


class Session:
    def __init__(self, sid, row):
        self.sid = sid
        self.row = row
        self.scratch = None
        self.seen = time.monotonic()
        self.attached = True

    def touch(self):
        self.seen = time.monotonic()


class SessionTable:
    def __init__(self, bank, ttl):
        self.bank = bank
        self.ttl = ttl
        self.sessions = {}
        self.history = {}

    def connect(self, sid):
        if sid in self.sessions:
            self.sessions[sid].touch()
            return self.sessions[sid]
        row = self.bank.open_row()  # clean: the session owns it, end() closes it
        if row is None:
            return None
        sess = Session(sid, row)
        self.sessions[sid] = sess
        return sess

    def reconnect(self, sid):
        row = self.bank.open_row()  # leak: the session of the first connection is overwritten with its row open
        if row is None:
            return None
        sess = Session(sid, row)
        self.sessions[sid] = sess
        return sess

    def takeover(self, sid):
        row = self.bank.open_row()  # clean: near miss, end() closes the old session before it is replaced
        if row is None:
            return None
        self.end(sid)
        self.sessions[sid] = Session(sid, row)
        return self.sessions[sid]

    def end(self, sid):
        sess = self.sessions.pop(sid, None)
        if sess is None:
            return False
        self.bank.close_row(sess.row)
        return True

    def use_scratch(self, sid):
        sess = self.sessions.get(sid)
        if sess is None or sess.scratch is not None:
            return False
        sess.scratch = self.bank.open_row()  # leak: end() closes the session's row but not its scratch row
        return sess.scratch is not None

    def expire(self, now):
        for sid in [s for s, x in self.sessions.items() if now - x.seen > self.ttl]:
            self.end(sid)

    def remember(self, sid):
        row = self.bank.open_row()  # leak: forget_all() clears the history without closing its rows
        if row is None:
            return
        prev = self.history.pop(sid, None)
        if prev is not None:
            self.bank.close_row(prev)
        self.history[sid] = row

    def forget_all(self):
        self.history.clear()

    def fork_session(self, sid, n):
        rows = self.bank.open_rows(n)  # leak: a session that is not attached returns an empty list, rows open
        if rows is None:
            return []
        sess = self.sessions.get(sid)
        if sess is None or not sess.attached:
            return []
        for row in rows:
            row.length = sess.row.length
        return rows

    def close(self):
        for sid in list(self.sessions):
            self.end(sid)


class Migrator:
    """Moves sessions from one bank to another."""

    def __init__(self, src, dst):
        self.src = src
        self.dst = dst
        self.outbox = []

    def move(self, sess):
        row = self.dst.open_row()  # clean: near miss, the session takes it and the old row is closed at its source
        if row is None:
            return False
        row.length = sess.row.length
        self.src.close_row(sess.row)
        sess.row = row
        return True

    def move_all(self, sessions):
        moved = 0
        for sess in sessions:
            row = self.dst.open_row()  # leak: detached sessions are counted and passed over with the row open
            if row is None:
                return moved
            if not sess.attached:
                moved += 1
                continue
            row.length = sess.row.length
            self.src.close_row(sess.row)
            sess.row = row
            moved += 1
        return moved

    def precopy(self, sess):
        row = self.dst.open_row()  # clean: near miss, queued in the outbox and flush() closes what is there
        if row is not None:
            row.length = sess.row.length
            self.outbox.append(row)
        return len(self.outbox)

    def flush(self):
        pending, self.outbox = self.outbox, []
        self.dst.close_rows(pending)
        return len(pending)


def try_resume(bank, tokens, limit):
    rows = bank.open_rows(2)  # clean: near miss, closed on the long-prompt return and at the end
    if rows is None:
        return False
    if len(tokens) > limit:
        bank.close_rows(rows)
        return False
    rows[0].length = len(tokens)
    bank.close_rows(rows)
    return True
