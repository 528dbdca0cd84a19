"""Server side session table: fixed rows, pinned while a request works on them."""
from __future__ import annotations

import hmac
import secrets
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, Optional


@dataclass
class Row:
    index: int
    sid: str = ""
    user: str = ""
    touched: float = 0.0
    pins: int = 0
    data: dict = field(default_factory=dict)


class TableFull(Exception):
    pass


class SessionTable:
    """
    allot/strike: a row of the table belongs to a session until it is struck.
    pin/unpin:    a pinned row is not moved by the compactor.
    """

    def __init__(self, rows: int, ttl: float = 1800.0) -> None:
        self.ttl = ttl
        self._rows = [Row(i) for i in range(rows)]
        self._unused = list(range(rows))
        self._index: dict[str, int] = {}
        self._mu = threading.RLock()

    def allot(self, user: str) -> Row:
        with self._mu:
            if not self._unused:
                raise TableFull(user)
            row = self._rows[self._unused.pop()]
            row.sid = secrets.token_urlsafe(24)
            row.user = user
            row.touched = time.time()
            self._index[row.sid] = row.index
            return row

    def strike(self, row: Row) -> None:
        with self._mu:
            self._index.pop(row.sid, None)
            row.sid = row.user = ""
            row.data = {}
            self._unused.append(row.index)

    def pin(self, sid: str) -> Optional[Row]:
        with self._mu:
            at = self._index.get(sid)
            if at is None:
                return None
            row = self._rows[at]
            row.pins += 1
            return row

    def unpin(self, row: Row) -> None:
        with self._mu:
            row.pins -= 1

    def slim(self, now: float) -> int:
        """Drops the bulky data of sessions which were not touched for long; the rows stay."""
        gone = 0
        for sid in list(self._index):
            row = self.pin(sid)  # leak: rows that are still young keep the pin
            if row is None:
                continue
            if now - row.touched < self.ttl:
                continue
            row.data = {"groups": row.data.get("groups", [])}
            self.unpin(row)
            gone += 1
        return gone

    @contextmanager
    def pinned(self, sid: str) -> Iterator[Optional[Row]]:
        row = self.pin(sid)  # clean: unpinned after the body
        try:
            yield row
        finally:
            if row is not None:
                self.unpin(row)


table = SessionTable(4096)


class RequestContext:
    """Lives as long as one request; the framework calls open, then the view, then teardown."""

    def __init__(self, cookie: str, csrf: str) -> None:
        self.cookie = cookie
        self.csrf = csrf
        self.row: Optional[Row] = None
        self.fresh = False

    def open(self) -> None:
        self.row = table.pin(self.cookie)  # clean: near miss, teardown unpins
        if self.row is not None:
            self.row.touched = time.time()

    def teardown(self) -> None:
        if self.row is None:
            return
        table.unpin(self.row)
        self.row = None


class AdminContext(RequestContext):
    """Has the admin's row and the one of the user who is looked at."""

    def __init__(self, cookie: str, csrf: str, subject: str) -> None:
        super().__init__(cookie, csrf)
        self.subject = subject
        self.target: Optional[Row] = None

    def open(self) -> None:
        super().open()
        self.target = table.pin(self.subject)  # leak: teardown of the base knows only the admin's row

    def teardown(self) -> None:
        if self.target is not None:
            self.target.touched = time.time()
            self.target = None
        super().teardown()


def csrf_ok(row: Row, given: str) -> bool:
    return hmac.compare_digest(row.data.get("csrf", ""), given)


def login(user: str, password_ok: bool, remember: bool) -> Optional[str]:
    row = table.allot(user)  # leak: the row of a failed login is never struck
    row.data["csrf"] = secrets.token_hex(16)
    row.data["remember"] = remember
    if not password_ok:
        return None
    return row.sid


def login_sso(user: str, assertion: Optional[dict]) -> Optional[str]:
    row = table.allot(user)  # clean: struck when the assertion is missing, else the session lives on
    if assertion is None or assertion.get("sub") != user:
        table.strike(row)
        return None
    row.data["groups"] = list(assertion.get("groups", ()))
    return row.sid


def logout(sid: str) -> bool:
    row = table.pin(sid)  # clean: unpinned, then struck
    if row is None:
        return False
    table.unpin(row)
    table.strike(row)
    return True


def whoami(sid: str) -> str:
    with table.pinned(sid) as row:  # clean: context manager
        return row.user if row is not None else "anonymous"


def checkout_cart(sid: str, csrf: str, coupon: Optional[str]) -> tuple[int, float]:
    row = table.pin(sid)  # leak: the 403 return keeps the pin
    if row is None:
        return 401, 0.0
    if not csrf_ok(row, csrf):
        return 403, 0.0
    total = 0.0
    for item in row.data.get("cart", []):
        if item.get("gift"):
            continue
        total += item["price"] * item["n"]
    if coupon:
        total *= 0.9
    row.data["cart"] = []
    table.unpin(row)
    return 200, total


def rotate(sid: str) -> Optional[str]:
    """New id for the same session, after a change of privileges."""
    old = table.pin(sid)  # clean: unpinned before it is struck
    if old is None:
        return None
    new = table.allot(old.user)  # clean: near miss, lives on under the new sid
    new.data.update(old.data)
    table.unpin(old)
    table.strike(old)
    return new.sid


def find_first(sids: list[str], group: str) -> Optional[Row]:
    """The first pinned row whose user is in the group. The caller unpins it."""
    for sid in sids:
        row = table.pin(sid)  # clean: unpinned when it does not match, else handed on
        if row is None:
            continue
        if group in row.data.get("groups", ()):
            return row
        table.unpin(row)
    return None


def notify_group(sids: list[str], group: str, text: str) -> bool:
    row = find_first(sids, group)  # leak: only a row without inbox is unpinned
    if row is None:
        return False
    inbox = row.data.get("inbox")
    if inbox is None:
        row.data["inbox"] = [text]
        table.unpin(row)
    else:
        inbox.append(text)
    return True


def kick_group(sids: list[str], group: str) -> int:
    gone = 0
    while (row := find_first(sids, group)) is not None:  # clean: unpinned and struck in the loop
        table.unpin(row)
        table.strike(row)
        gone += 1
    return gone
