"""Outgoing mail: sessions to relays, reserved message numbers, per domain sending rights."""
from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Iterable, Protocol

log = logging.getLogger("relay")


@dataclass
class Mail:
    sender: str
    rcpt: str
    body: bytes
    tries: int = 0

    @property
    def domain(self) -> str:
        return self.rcpt.rpartition("@")[2]


class RelaySession:
    def __init__(self, relay: str, tls: bool) -> None:
        self.relay = relay
        self.tls = tls
        self.sent = 0

    def command(self, line: str) -> int:
        return 250

    def data(self, body: bytes) -> int:
        self.sent += 1
        return 250

    def quit(self) -> None:
        self.command("QUIT")


class Sessions(Protocol):
    def dial(self, relay: str) -> RelaySession | None: ...
    def hang_up(self, session: RelaySession) -> None: ...


class PlainSessions:
    """Relays allow a number of sessions at a time; each dialled one is hung up sometime."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.live: Counter[str] = Counter()

    def dial(self, relay: str) -> RelaySession | None:
        if self.live[relay] >= self.limit:
            return None
        self.live[relay] += 1
        return RelaySession(relay, tls=False)

    def hang_up(self, session: RelaySession) -> None:
        session.quit()
        self.live[session.relay] -= 1


class ReusingSessions:
    """Wraps other sessions and keeps some of them for later."""

    def __init__(self, inner: Sessions, keep: int, max_sent: int = 100) -> None:
        self.inner = inner
        self.keep = keep
        self.max_sent = max_sent
        self._kept: deque[RelaySession] = deque()

    def dial(self, relay: str) -> RelaySession | None:
        for _ in range(len(self._kept)):
            session = self._kept.popleft()
            if session.relay == relay:
                return session
            self._kept.append(session)
        return self.inner.dial(relay)  # leak: hang_up of the wrapper loses a session that is used up

    def hang_up(self, session: RelaySession) -> None:
        if session.sent >= self.max_sent:
            log.info("session to %s is used up", session.relay)
            return
        if len(self._kept) < self.keep:
            self._kept.append(session)
        else:
            self.inner.hang_up(session)

    def idle(self) -> None:
        while self._kept:
            self.inner.hang_up(self._kept.popleft())


class Rights:
    """The right to send to a domain: large providers want few senders at a time."""

    def __init__(self, per_domain: int) -> None:
        self.per_domain = per_domain
        self._given: Counter[str] = Counter()

    def obtain(self, domain: str) -> bool:
        if self._given[domain] >= self.per_domain:
            return False
        self._given[domain] += 1
        return True

    def cede(self, domain: str) -> None:
        self._given[domain] -= 1


@dataclass
class Outcome:
    sent: int = 0
    deferred: list[Mail] = field(default_factory=list)
    bounced: list[Mail] = field(default_factory=list)


class Sender:
    def __init__(self, sessions: Sessions, rights: Rights, relays: list[str]) -> None:
        self.sessions = sessions
        self.rights = rights
        self.relays = relays

    def connect(self, want_tls: bool) -> RelaySession | None:
        """The first relay which takes us and has what we want."""
        for relay in self.relays:
            session = self.sessions.dial(relay)  # clean: hung up when it does not fit, else handed on
            if session is None:
                continue
            if want_tls and not session.tls:
                self.sessions.hang_up(session)
                continue
            return session
        return None

    def transmit(self, session: RelaySession, mail: Mail) -> int:
        for line in (f"MAIL FROM:<{mail.sender}>", f"RCPT TO:<{mail.rcpt}>"):
            code = session.command(line)
            if code >= 400:
                return code
        return session.data(mail.body)

    def send(self, mail: Mail, out: Outcome) -> None:
        session = self.connect(want_tls=False)  # clean: hung up before the code is looked at
        if session is None:
            out.deferred.append(mail)
            return
        code = self.transmit(session, mail)
        self.sessions.hang_up(session)
        if code < 400:
            out.sent += 1
        elif code < 500:
            out.deferred.append(mail)
        else:
            out.bounced.append(mail)

    def send_all(self, mails: Iterable[Mail]) -> Outcome:
        out = Outcome()
        for mail in mails:
            if not self.rights.obtain(mail.domain):  # leak: a mail with too many tries goes on without cede
                out.deferred.append(mail)
                continue
            if mail.tries > 5:
                out.bounced.append(mail)
                continue
            self.send(mail, out)
            self.rights.cede(mail.domain)
        return out

    def send_bulk(self, mails: list[Mail]) -> Outcome:
        """One session for as long as it works, a new one after a refusal."""
        out = Outcome()
        session = self.connect(want_tls=False)  # leak: rebound after a 421 without being hung up
        for mail in mails:
            if session is None:
                out.deferred.append(mail)
                continue
            code = self.transmit(session, mail)
            if code == 421:
                out.deferred.append(mail)
                session = self.connect(want_tls=False)  # leak: rebound again after the next 421
                continue
            out.sent += 1
        if session is not None:
            self.sessions.hang_up(session)
        return out

    def send_domain(self, domain: str, mails: list[Mail]) -> Outcome:
        out = Outcome()
        if not self.rights.obtain(domain):  # clean: ceded in the finally
            out.deferred.extend(mails)
            return out
        try:
            session = self.connect(want_tls=True)  # clean: hung up, rebound only after that
            for mail in mails:
                if session is None:
                    out.deferred.append(mail)
                    continue
                code = self.transmit(session, mail)
                if code == 421:
                    out.deferred.append(mail)
                    self.sessions.hang_up(session)
                    session = self.connect(want_tls=True)  # clean: hung up by the next round or below
                    continue
                out.sent += code < 400
            if session is not None:
                self.sessions.hang_up(session)
            return out
        finally:
            self.rights.cede(domain)

    def verify(self, mail: Mail, attempts: int = 2) -> bool | None:
        for n in range(attempts):
            session = self.connect(want_tls=True)  # leak: an address that is known returns with the session
            if session is None:
                time.sleep(n)
                continue
            code = session.command(f"VRFY {mail.rcpt}")
            if code == 250:
                return True
            self.sessions.hang_up(session)
            if code >= 500:
                return False
        return None
