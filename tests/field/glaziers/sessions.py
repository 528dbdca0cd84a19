"""Stateful chat sessions with token quotas and on-disk transcripts."""
import json
import threading
from pathlib import Path
from typing import IO, Callable, Dict, Iterator, List, Optional


class QuotaExceeded(Exception):
    pass


class Ticket:
    __slots__ = ("tenant", "tokens")

    def __init__(self, tenant: str, tokens: int) -> None:
        self.tenant = tenant
        self.tokens = tokens


class QuotaLedger:
    def __init__(self, budget: int) -> None:
        self._left: Dict[str, int] = {}
        self._budget = budget

    def reserve(self, tenant: str, tokens: int) -> Ticket:
        left = self._left.get(tenant, self._budget)
        if left < tokens:
            raise QuotaExceeded(tenant)
        self._left[tenant] = left - tokens
        return Ticket(tenant, tokens)

    def settle(self, ticket: Ticket, used: int) -> None:
        self._left[ticket.tenant] += max(0, ticket.tokens - used)


class Session:
    def __init__(self, sid: str, tenant: str) -> None:
        self.sid = sid
        self.tenant = tenant
        self.history: List[dict] = []
        self.busy = False


class SessionTable:
    def __init__(self) -> None:
        self._rows: Dict[str, Session] = {}
        self._cv = threading.Condition()

    def create(self, sid: str, tenant: str) -> None:
        with self._cv:
            self._rows.setdefault(sid, Session(sid, tenant))

    def checkout(self, sid: str) -> Optional[Session]:
        with self._cv:
            sess = self._rows.get(sid)
            if sess is None:
                return None
            self._cv.wait_for(lambda: not sess.busy)
            sess.busy = True
            return sess

    def try_checkout(self, sid: str) -> Optional[Session]:
        with self._cv:
            sess = self._rows.get(sid)
            if sess is None or sess.busy:
                return None
            sess.busy = True
            return sess

    def checkin(self, sess: Session) -> None:
        with self._cv:
            sess.busy = False
            self._cv.notify_all()

    def ids(self) -> List[str]:
        return list(self._rows)


class Transcripts:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: List[IO[str]] = []

    def open_log(self, sid: str, mode: str = "a") -> IO[str]:
        f = open(self.root / f"{sid}.jsonl", mode)  # clean: near miss, listed and returned; close_log closes it
        self._open.append(f)
        return f

    def close_log(self, f: IO[str]) -> None:
        self._open.remove(f)
        f.close()


class Turn:
    """One user turn: a busy session, a reserved budget and an open transcript."""

    def __init__(self, server: "ChatServer", sess: Session, tokens: int) -> None:
        self.server = server
        self.sess = sess
        self.tokens = tokens
        self.used = 0

    def __enter__(self) -> "Turn":
        self.ticket = self.server.ledger.reserve(self.sess.tenant, self.tokens)  # leak: __exit__ returns before settle when nothing was generated
        self.log = self.server.logs.open_log(self.sess.sid)  # clean: near miss, __exit__ closes it before any return
        return self

    def __exit__(self, et, exc, tb) -> bool:
        self.server.logs.close_log(self.log)
        if self.used == 0:
            return False
        self.server.ledger.settle(self.ticket, self.used)
        return False


class ChatServer:
    def __init__(self, table: SessionTable, ledger: QuotaLedger, logs: Transcripts,
                 generate: Callable[[List[dict], int], Iterator[str]]) -> None:
        self.table = table
        self.ledger = ledger
        self.logs = logs
        self.generate = generate

    def chat(self, sid: str, prompt: str, max_tokens: int) -> Optional[str]:
        sess = self.table.checkout(sid)  # clean: near miss, checked in by the finally, None holds nothing
        if sess is None:
            return None
        try:
            with Turn(self, sess, max_tokens) as turn:
                sess.history.append({"role": "user", "content": prompt})
                pieces = []
                for piece in self.generate(sess.history, max_tokens):
                    pieces.append(piece)
                    turn.used += 1
                turn.log.write(json.dumps(pieces) + "\n")
                return "".join(pieces)
        finally:
            self.table.checkin(sess)

    def summarize(self, sid: str, max_tokens: int) -> Optional[str]:
        sess = self.table.try_checkout(sid)  # leak: a session out of budget is returned from still busy
        if sess is None:
            return None
        try:
            ticket = self.ledger.reserve(sess.tenant, max_tokens)  # clean: settled after the text is made
        except QuotaExceeded:
            return None
        text = "".join(self.generate(sess.history, max_tokens))
        self.ledger.settle(ticket, len(text) // 4)
        self.table.checkin(sess)
        return text

    def rename_role(self, sid: str, old: str, new: str) -> int:
        sess = self.table.checkout(sid)  # clean: near miss, an empty history is checked in before its return as well
        if sess is None:
            return 0
        if not sess.history:
            self.table.checkin(sess)
            return 0
        n = 0
        for msg in sess.history:
            if msg["role"] == old:
                msg["role"] = new
                n += 1
        self.table.checkin(sess)
        return n

    def compact(self, keep: int) -> int:
        trimmed = 0
        for sid in self.table.ids():
            sess = self.table.try_checkout(sid)  # leak: a short history goes on to the next session without checkin
            if sess is None:
                continue
            if len(sess.history) <= keep:
                continue
            del sess.history[:-keep]
            trimmed += 1
            self.table.checkin(sess)
        return trimmed

    def export(self, sid: str) -> List[dict]:
        log = self.logs.open_log(sid, "r")  # leak: the first broken line returns what was read with the file open
        rows: List[dict] = []
        for line in log:
            try:
                rows.append({"pieces": json.loads(line)})
            except json.JSONDecodeError:
                return rows
        self.logs.close_log(log)
        return rows

    def tail(self, sid: str) -> Iterator[str]:
        log = self.logs.open_log(sid, "r")  # clean: near miss, closing the generator runs the finally too
        try:
            for line in log:
                yield line.rstrip("\n")
        finally:
            self.logs.close_log(log)
