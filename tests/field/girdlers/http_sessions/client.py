"""Client with retries and streaming on top of the session pool."""
from __future__ import annotations

import json
import time
from typing import Any, Iterator, Optional

from .sessions import Reply, Session, SessionPool

RETRY_STATUS = {429, 502, 503, 504}


class Client:
    def __init__(self, pool: SessionPool, host: str, retries: int = 3) -> None:
        self.pool = pool
        self.host = host
        self.retries = retries
        self._pinned: Optional[Session] = None

    def get(self, path: str) -> Reply:
        with self.pool.session(self.host) as session:  # clean: context manager
            return session.send("GET", path)

    def post(self, path: str, payload: Any) -> Optional[Reply]:
        body = json.dumps(payload).encode()
        for attempt in range(self.retries):
            session = self.pool.obtain(self.host)  # leak: a reply to be retried continues without giving back
            reply = session.send("POST", path, body)
            if reply.status in RETRY_STATUS:
                time.sleep(2 ** attempt)
                continue
            self.pool.relinquish(session)
            return reply
        return None

    def put(self, path: str, body: bytes) -> Optional[Reply]:
        for attempt in range(self.retries):
            session = self.pool.obtain(self.host)  # clean: given back in finally in every attempt
            try:
                reply = session.send("PUT", path, body)
                if reply.status not in RETRY_STATUS:
                    return reply
            except OSError:
                continue
            finally:
                self.pool.relinquish(session)
            time.sleep(2 ** attempt)
        return None

    def pages(self, path: str) -> Iterator[dict[str, Any]]:
        """Follows `next` links with one session for the whole listing."""
        session = self.pool.obtain_recent(self.host)  # leak: an error status ends the generator early
        link: Optional[str] = path
        while link:
            reply = session.send("GET", link)
            if reply.status != 200:
                return
            page = json.loads(reply.body)
            yield from page["items"]
            link = page.get("next")
        self.pool.relinquish(session)

    def pages_once(self, path: str) -> Iterator[dict[str, Any]]:
        session = self.pool.obtain_recent(self.host)  # clean: the finally covers the early return too
        try:
            link: Optional[str] = path
            while link:
                reply = session.send("GET", link)
                if reply.status != 200:
                    return
                page = json.loads(reply.body)
                yield from page["items"]
                link = page.get("next")
        finally:
            self.pool.relinquish(session)

    # -- a pinned session: login state of some partners is bound to the connection
    def login(self, user: str, secret: str) -> bool:
        if self._pinned is not None:
            return True
        session = self.pool.obtain(self.host)  # clean: pinned for logout, or given back when refused
        reply = session.send("POST", "/login", f"{user}:{secret}".encode())
        if reply.status != 200:
            self.pool.relinquish(session)
            return False
        self._pinned = session
        return True

    def logout(self) -> None:
        if self._pinned is not None:
            self._pinned.send("POST", "/logout")
            self.pool.relinquish(self._pinned)
            self._pinned = None

    def relogin(self, user: str, secret: str) -> bool:
        """Switches the user; the partner wants a new connection for it."""
        session = self.pool.obtain(self.host)  # clean: pinned for logout, or given back when refused
        if session.send("POST", "/login", f"{user}:{secret}".encode()).status != 200:
            self.pool.relinquish(session)
            return False
        previous, self._pinned = self._pinned, session
        if previous is not None:
            previous.send("POST", "/logout")
            self.pool.relinquish(previous)
        return True
