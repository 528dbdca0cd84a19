"""Session front of the Parlour gateway: sessions, upstream connections, listeners, scopes, uploads."""
from __future__ import annotations

import contextvars
import secrets
import threading
import time
from collections import OrderedDict
from typing import Callable, Dict, List, Optional


class SessionBook:
    """Live chat sessions by id. A session counts against its user's limit until it is finished."""

    def __init__(self, per_user: int = 4) -> None:
        self._per_user = per_user
        self._sessions: "OrderedDict[str, str]" = OrderedDict()
        self._count: Dict[str, int] = {}

    def start(self, user: str) -> str:
        if self._count.get(user, 0) >= self._per_user:
            raise PermissionError(f"{user} has too many sessions")
        sid = secrets.token_hex(8)
        self._sessions[sid] = user
        self._count[user] = self._count.get(user, 0) + 1
        return sid

    def touch(self, sid: str) -> None:
        self._sessions.move_to_end(sid)

    def finish(self, sid: str) -> None:
        user = self._sessions.pop(sid)
        self._count[user] -= 1
        if not self._count[user]:
            del self._count[user]


def open_chat(book: SessionBook, user: str, model, greeting: str) -> Optional[str]:
    sid = book.start(user)  # leak: an unknown model name returns None and the session is not finished
    if not model.exists():
        return None
    model.say(sid, greeting)
    return sid


def one_question(book: SessionBook, user: str, model, text: str) -> str:
    sid = book.start(user)  # clean: finished in finally
    try:
        return model.say(sid, text)
    except TimeoutError:
        return ""
    finally:
        book.finish(sid)


class Lounge:
    def __init__(self, book: SessionBook) -> None:
        self.book = book
        self.sid_of: Dict[int, str] = {}

    def on_open(self, sock: int, user: str) -> None:
        self.sid_of[sock] = self.book.start(user)  # leak: on_error drops the socket's entry without finishing

    def on_close(self, sock: int) -> None:
        self.book.finish(self.sid_of.pop(sock))

    def on_error(self, sock: int) -> None:
        self.sid_of.pop(sock, None)


class Upstream:
    def __init__(self, host: str) -> None:
        self.host = host
        self.broken = False
        self.used_at = time.monotonic()

    def request(self, body: bytes) -> bytes:
        self.used_at = time.monotonic()
        return body


class UpstreamPool:
    """Keep-alive connections to one backend. A connection is parked for reuse or scuttled."""

    def __init__(self, host: str, size: int) -> None:
        self._host = host
        self._size = size
        self._parked: List[Upstream] = []
        self._abroad = 0
        self._cv = threading.Condition()

    def embark(self, timeout: Optional[float] = None) -> Upstream:
        with self._cv:
            if not self._cv.wait_for(lambda: self._parked or self._abroad < self._size, timeout):
                raise TimeoutError(self._host)
            self._abroad += 1
            return self._parked.pop() if self._parked else Upstream(self._host)

    def park(self, conn: Upstream) -> None:
        with self._cv:
            self._abroad -= 1
            self._parked.append(conn)
            self._cv.notify()

    def scuttle(self, conn: Upstream) -> None:
        with self._cv:
            self._abroad -= 1
            conn.broken = True
            self._cv.notify()


def relay(pool: UpstreamPool, body: bytes) -> Optional[bytes]:
    conn = pool.embark(1.0)  # clean: scuttled on the error, parked else
    try:
        answer = conn.request(body)
    except OSError:
        pool.scuttle(conn)
        return None
    pool.park(conn)
    return answer


def relay_with_retry(pool: UpstreamPool, body: bytes) -> bytes:
    conn = pool.embark()  # leak: a broken first connection is replaced without being scuttled
    try:
        answer = conn.request(body)
    except OSError:
        conn = pool.embark()  # clean: parked at the end
        answer = conn.request(body)
    pool.park(conn)
    return answer


def check_backends(pools: Dict[str, UpstreamPool]) -> Dict[str, bool]:
    health = {}
    for host, pool in pools.items():
        conn = pool.embark(0.5)  # leak: an unhealthy answer goes to the next host with the connection abroad
        answer = conn.request(b"GET /health")
        health[host] = answer == b"ok"
        if health[host]:
            pool.park(conn)
    return health


class Newsroom:
    """Listeners on a topic. Subscribing gives the call that ends the subscription."""

    def __init__(self) -> None:
        self._listeners: Dict[str, Dict[int, Callable]] = {}
        self._serial = 0

    def subscribe(self, topic: str, listener: Callable) -> Callable[[], None]:
        self._serial += 1
        key = self._serial
        self._listeners.setdefault(topic, {})[key] = listener

        def cancel() -> None:
            row = self._listeners.get(topic, {})
            row.pop(key, None)
            if not row:
                self._listeners.pop(topic, None)

        return cancel

    def tell(self, topic: str, item) -> None:
        for listener in list(self._listeners.get(topic, {}).values()):
            listener(item)


def wait_for_item(news: Newsroom, topic: str, timeout: float):
    box: List = []
    got = threading.Event()
    cancel = news.subscribe(topic, lambda item: (box.append(item), got.set()))  # leak: a timeout returns None while subscribed
    if not got.wait(timeout):
        return None
    cancel()
    return box[0]


class Ticker:
    def __init__(self, news: Newsroom) -> None:
        self.news = news
        self.cancels: List[Callable] = []

    def follow(self, topics: List[str], sink) -> None:
        for topic in topics:
            cancel = self.news.subscribe(topic, sink)  # clean: queued in cancels, called in stop
            self.cancels.append(cancel)

    def stop(self) -> None:
        for cancel in self.cancels:
            cancel()
        self.cancels.clear()


class Scope:
    def __init__(self, stack: "ScopeStack", rid: str) -> None:
        self.stack = stack
        self.rid = rid
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def pop(self) -> None:
        self.stack._drop(self)


class ScopeStack:
    """Cancel scopes of the running task; the innermost one rules. Scopes take themselves off."""

    def __init__(self) -> None:
        self._var: contextvars.ContextVar = contextvars.ContextVar("scopes", default=())

    def push(self, rid: str) -> Scope:
        scope = Scope(self, rid)
        self._var.set(self._var.get() + (scope,))
        return scope

    def _drop(self, scope: Scope) -> None:
        self._var.set(tuple(s for s in self._var.get() if s is not scope))

    @property
    def innermost(self) -> Optional[Scope]:
        scopes = self._var.get()
        return scopes[-1] if scopes else None


def run_cancellable(scopes: ScopeStack, rid: str, steps) -> bool:
    scope = scopes.push(rid)  # leak: a cancelled run returns False with its scope on the stack
    for step in steps:
        if scope.cancelled:
            return False
        step()
    scope.pop()
    return True


def run_shielded(scopes: ScopeStack, rid: str, steps) -> bool:
    scope = scopes.push(rid)  # clean: popped in finally
    try:
        for step in steps:
            if scope.cancelled:
                return False
            step()
        return True
    finally:
        scope.pop()


class PartUploads:
    """Multipart uploads of attachments; each is completed or aborted, else its parts stay on disk."""

    def __init__(self, store) -> None:
        self._store = store
        self._open: Dict[str, List[str]] = {}

    def initiate(self, key: str) -> str:
        upload = f"{key}#{secrets.token_hex(4)}"
        self._open[upload] = []
        return upload

    def add_part(self, upload: str, data: bytes) -> None:
        self._open[upload].append(self._store.put_part(upload, data))

    def complete(self, upload: str) -> str:
        return self._store.join(upload, self._open.pop(upload))

    def abort(self, upload: str) -> None:
        for part in self._open.pop(upload):
            self._store.delete_part(part)


def upload_file(uploads: PartUploads, key: str, reader, most: int) -> Optional[str]:
    upload = uploads.initiate(key)  # leak: a file over the limit returns None with its parts kept
    total = 0
    for data in reader:
        total += len(data)
        if total > most:
            return None
        uploads.add_part(upload, data)
    return uploads.complete(upload)


def upload_checked(uploads: PartUploads, key: str, reader, scanner) -> Optional[str]:
    upload = uploads.initiate(key)  # clean: aborted when the scanner objects, completed else
    for data in reader:
        if not scanner.ok(data):
            uploads.abort(upload)
            return None
        uploads.add_part(upload, data)
    return uploads.complete(upload)


class TitleCache:
    """Session titles, least recently read go first. Dropping a title costs nothing."""

    def __init__(self, cap: int = 1000) -> None:
        self._titles: "OrderedDict[str, str]" = OrderedDict()
        self._cap = cap

    def fetch(self, sid: str, make) -> str:
        if sid not in self._titles:
            self._titles[sid] = make(sid)
        self._titles.move_to_end(sid)
        while len(self._titles) > self._cap:
            self._titles.popitem(last=False)
        return self._titles[sid]

    def evict(self, sid: str) -> None:
        self._titles.pop(sid, None)


def sidebar(titles: TitleCache, sids: List[str], make) -> List[str]:
    shown = []
    for sid in sids:
        title = titles.fetch(sid, make)  # clean: a cache of strings
        if not title:
            continue
        shown.append(title)
    return shown
