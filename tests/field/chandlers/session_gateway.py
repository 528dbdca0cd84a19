"""Front gateway: per-tenant admission, upstream channels and sticky chat sessions."""
from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass, field

LOG = logging.getLogger("gateway")


@dataclass(frozen=True)
class Ticket:
    serial: int
    tenant: str


class AdmissionGate:
    def __init__(self, quota: dict[str, int], default: int = 8):
        self._quota = quota
        self._default = default
        self._live: dict[str, set[int]] = {}
        self._serial = itertools.count(1)
        self._mu = threading.Lock()

    def admit(self, tenant: str) -> Ticket | None:
        with self._mu:
            live = self._live.setdefault(tenant, set())
            if len(live) >= self._quota.get(tenant, self._default):
                return None
            ticket = Ticket(next(self._serial), tenant)
            live.add(ticket.serial)
            return ticket

    def dismiss(self, ticket: Ticket) -> None:
        with self._mu:
            self._live[ticket.tenant].discard(ticket.serial)


class Channel:
    def __init__(self, addr: str):
        self.addr = addr
        self.broken = False

    def call(self, body: bytes) -> bytes:
        if self.broken:
            raise ConnectionError(self.addr)
        return body[::-1]


class Switchboard:
    def __init__(self, addrs: list[str], lines_each: int):
        self._lines = {a: [Channel(a) for _ in range(lines_each)] for a in addrs}

    def dial(self, addr: str) -> Channel | None:
        lines = self._lines.get(addr)
        return lines.pop() if lines else None

    def hang_up(self, ch: Channel) -> None:
        ch.broken = False
        self._lines[ch.addr].append(ch)


@dataclass
class ChatSession:
    sid: str
    ticket: Ticket
    channel: Channel
    standby: Channel | None = None
    touched: float = field(default_factory=time.monotonic)


class Gateway:
    def __init__(self, gate: AdmissionGate, board: Switchboard, ttl: float = 300.0):
        self.gate = gate
        self.board = board
        self.ttl = ttl
        self.sessions: dict[str, ChatSession] = {}

    def connect(self, sid: str, tenant: str, addr: str) -> ChatSession | None:
        ticket = self.gate.admit(tenant)  # leak: sweep() hangs up idle sessions but does not dismiss their tickets
        if ticket is None:
            return None
        ch = self.board.dial(addr)  # clean: near miss, kept in the session and hung up by close, sweep and failover
        if ch is None:
            self.gate.dismiss(ticket)
            return None
        sess = ChatSession(sid, ticket, ch)
        self.sessions[sid] = sess
        return sess

    def close(self, sid: str) -> None:
        sess = self.sessions.pop(sid, None)
        if sess is None:
            return
        self._hang_up_all(sess)
        self.gate.dismiss(sess.ticket)

    def sweep(self) -> int:
        cutoff = time.monotonic() - self.ttl
        stale = [s for s in self.sessions.values() if s.touched < cutoff]
        for sess in stale:
            del self.sessions[sess.sid]
            self._hang_up_all(sess)
        return len(stale)

    def _hang_up_all(self, sess: ChatSession) -> None:
        self.board.hang_up(sess.channel)
        if sess.standby is not None:
            self.board.hang_up(sess.standby)
            sess.standby = None

    def add_standby(self, sid: str, addr: str) -> bool:
        sess = self.sessions[sid]
        if sess.standby is not None:
            return True
        sess.standby = self.board.dial(addr)  # clean: near miss, filled only when empty, _hang_up_all takes it back
        return sess.standby is not None

    def failover(self, sid: str, addr: str) -> bool:
        sess = self.sessions[sid]
        ch = self.board.dial(addr)  # clean: near miss, the broken channel is hung up before it is replaced
        if ch is None:
            return False
        self.board.hang_up(sess.channel)
        sess.channel = ch
        return True

    def restandby(self, sid: str, addr: str) -> bool:
        sess = self.sessions[sid]
        ch = self.board.dial(addr)  # leak: a standby set up earlier is overwritten and never hung up
        if ch is None:
            return False
        sess.standby = ch
        return True

    def oneshot(self, tenant: str, addr: str, body: bytes) -> tuple[int, bytes]:
        ticket = self.gate.admit(tenant)  # clean: dismissed in finally
        if ticket is None:
            return 429, b""
        try:
            ch = self.board.dial(addr)  # leak: the handler of ConnectionError answers 502 without hanging up
            if ch is None:
                return 503, b""
            try:
                reply = ch.call(body)
            except ConnectionError:
                return 502, b""
            self.board.hang_up(ch)
            return 200, reply
        finally:
            self.gate.dismiss(ticket)

    def hedged(self, addrs: tuple[str, str], body: bytes) -> bytes | None:
        first = self.board.dial(addrs[0])  # leak: when the second address has no line, the first is not hung up
        if first is None:
            return None
        second = self.board.dial(addrs[1])  # clean: hung up after both calls
        if second is None:
            return None
        try:
            return first.call(body) or second.call(body)
        finally:
            self.board.hang_up(first)
            self.board.hang_up(second)

    def any_line(self, addrs: list[str]) -> Channel | None:
        for addr in addrs:
            ch = self.board.dial(addr)  # clean: handed to the caller
            if ch is not None:
                return ch
        return None

    def broadcast(self, addrs: list[str], body: bytes) -> int:
        ok = 0
        for addr in addrs:
            ch = self.board.dial(addr)  # clean: near miss, hung up in finally also for continue
            if ch is None:
                continue
            try:
                if not ch.call(body):
                    continue
                ok += 1
            except ConnectionError:
                LOG.warning("broadcast to %s failed", addr)
            finally:
                self.board.hang_up(ch)
        return ok

    def ping(self, addrs: list[str]) -> str | None:
        ch = self.any_line(addrs)  # leak: only the address is returned, the line is dropped
        if ch is None:
            return None
        ch.call(b"ping")
        return ch.addr
