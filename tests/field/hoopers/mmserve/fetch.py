"""Images come from the net: keep-alive connections by host, redirects, retries."""
from __future__ import annotations

import http.client
import logging
import threading
from collections import defaultdict
from typing import Dict, List, Optional
from urllib.parse import urljoin, urlsplit

logger = logging.getLogger("mmserve.fetch")


class FetchError(Exception):
    pass


class HostBusy(FetchError):
    pass


class Connections:
    def __init__(self, per_host: int = 4) -> None:
        self._idle: Dict[str, List[http.client.HTTPSConnection]] = defaultdict(list)
        self._out: Dict[str, int] = defaultdict(int)
        self._per_host = per_host
        self._lock = threading.Lock()

    def lend(self, host: str) -> http.client.HTTPSConnection:
        with self._lock:
            if self._out[host] >= self._per_host:
                raise HostBusy(host)
            self._out[host] += 1
            idle = self._idle[host]
            conn = idle.pop() if idle else http.client.HTTPSConnection(host, timeout=10)  # clean: returned
        conn.pool_key = host
        return conn

    def take_back(self, conn: http.client.HTTPSConnection, broken: bool = False) -> None:
        with self._lock:
            self._out[conn.pool_key] -= 1
            if not broken:
                self._idle[conn.pool_key].append(conn)
        if broken:
            conn.close()


class Fetcher:
    MAX_BYTES = 32 << 20

    def __init__(self, conns: Connections) -> None:
        self.conns = conns

    def get(self, url: str, hops: int = 4) -> bytes:
        """Follows redirects, also to other hosts."""
        parts = urlsplit(url)
        conn = self.conns.lend(parts.netloc)  # leak: a redirect to another host rebinds conn, the finally sees the last one only
        try:
            for _ in range(hops):
                conn.request("GET", parts.path or "/")
                resp = conn.getresponse()
                if resp.status in (301, 302, 307, 308):
                    url = urljoin(url, resp.getheader("Location", ""))
                    resp.read()
                    if urlsplit(url).netloc != parts.netloc:
                        conn = self.conns.lend(urlsplit(url).netloc)  # leak: a second change of host rebinds it in turn
                    parts = urlsplit(url)
                    continue
                body = resp.read(self.MAX_BYTES + 1)
                if resp.status != 200 or len(body) > self.MAX_BYTES:
                    raise FetchError(f"{url}: {resp.status}, {len(body)} bytes")
                return body
            raise FetchError(f"{url}: too many redirects")
        finally:
            self.conns.take_back(conn, broken=True)

    def head_size(self, url: str) -> Optional[int]:
        parts = urlsplit(url)
        try:
            conn = self.conns.lend(parts.netloc)  # clean: each of the three ends takes it back
        except HostBusy:
            return None
        try:
            conn.request("HEAD", parts.path or "/")
            resp = conn.getresponse()
            resp.read()
        except (OSError, http.client.HTTPException) as exc:
            self.conns.take_back(conn, broken=True)
            logger.info("HEAD %s: %s", url, exc)
            return None
        self.conns.take_back(conn)
        length = resp.getheader("Content-Length")
        return int(length) if length and length.isdigit() else None
