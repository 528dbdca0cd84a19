"""Small HTTP client with keep-alive: per host wires, responses that own their wire, streaming."""
from __future__ import annotations

import json
import logging
import time
from collections import defaultdict, deque
from typing import Any, Callable, Iterator

log = logging.getLogger("wire")


class Wire:
    def __init__(self, host: str) -> None:
        self.host = host
        self.alive = True
        self.born = time.monotonic()
        self._inbox: deque[bytes] = deque()

    def send(self, raw: bytes) -> None:
        self._inbox.append(b"HTTP/1.1 200 OK")

    def read(self) -> bytes:
        return self._inbox.popleft() if self._inbox else b""

    def shut(self) -> None:
        self.alive = False


class WirePool:
    def __init__(self, per_host: int) -> None:
        self.per_host = per_host
        self._free: dict[str, deque[Wire]] = defaultdict(deque)
        self._out: dict[str, int] = defaultdict(int)

    def obtain(self, host: str) -> Wire | None:
        """None when the host has all its wires in use."""
        if self._free[host]:
            self._out[host] += 1
            return self._free[host].pop()
        if self._out[host] >= self.per_host:
            return None
        self._out[host] += 1
        return Wire(host)

    def restore(self, wire: Wire) -> None:
        self._out[wire.host] -= 1
        if wire.alive:
            self._free[wire.host].append(wire)

    def scrap(self, wire: Wire) -> None:
        wire.shut()
        self._out[wire.host] -= 1


class Response:
    """Owns the wire until it is read to the end or closed."""

    def __init__(self, pool: WirePool, wire: Wire, status: int) -> None:
        self._pool = pool
        self._wire: Wire | None = wire
        self.status = status
        self.headers: dict[str, str] = {}

    def read(self) -> bytes:
        parts = []
        while self._wire is not None:
            chunk = self._wire.read()
            if not chunk:
                self.close()
            else:
                parts.append(chunk)
        return b"".join(parts)

    def close(self) -> None:
        if self._wire is not None:
            self._pool.restore(self._wire)
            self._wire = None

    def __enter__(self) -> "Response":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class Client:
    def __init__(self, per_host: int = 8) -> None:
        self.pool = WirePool(per_host)
        self.hooks: list[Callable[[Response], None]] = []
        self.refused = 0

    def request(self, method: str, host: str, path: str, body: bytes = b"") -> Response | None:
        wire = self.pool.obtain(host)  # clean: moves into the response
        if wire is None:
            self.refused += 1
            return None
        wire.send(f"{method} {path} HTTP/1.1\r\n".encode() + body)
        status = int(wire.read().split()[1])
        response = Response(self.pool, wire, status)
        for hook in self.hooks:
            hook(response)
        return response

    def get(self, host: str, path: str) -> Response | None:
        return self.request("GET", host, path)  # clean: handed on

    def get_json(self, host: str, path: str) -> Any:
        resp = self.get(host, path)  # leak: a status other than 200 returns without read or close
        if resp is None:
            return None
        if resp.status != 200:
            log.warning("%s%s answered %d", host, path, resp.status)
            return None
        return json.loads(resp.read() or b"null")

    def get_text(self, host: str, path: str) -> str:
        resp = self.get(host, path)  # clean: near miss, read closes the response at its end
        if resp is None:
            return ""
        text = resp.read().decode()
        return text.strip()

    def exists(self, host: str, path: str) -> bool:
        resp = self.request("HEAD", host, path)  # leak: only the status is looked at
        return resp is not None and resp.status < 400

    def delete(self, host: str, path: str) -> bool:
        resp = self.request("DELETE", host, path)  # clean: closed by with
        if resp is None:
            return False
        with resp:
            return resp.status in (200, 202, 204)

    def follow(self, host: str, path: str, hops: int = 5) -> Response | None:
        """Follows redirects; the final response belongs to the caller."""
        resp = self.get(host, path)  # leak: overwritten by the next hop without close
        for _ in range(hops):
            if resp is None or resp.status not in (301, 302, 307):
                break
            target = resp.headers.get("location", path)
            log.debug("%s -> %s", path, target)
            path = target
            resp = self.get(host, path)  # leak: lost likewise when it redirects again
        return resp

    def get_retry(self, host: str, path: str, attempts: int) -> Response | None:
        for n in range(attempts):
            resp = self.get(host, path)  # clean: closed before the next attempt, else handed on
            if resp is None:
                time.sleep(0.1 * n)
                continue
            if resp.status < 500:
                return resp
            resp.close()
        return None

    def lines(self, host: str, path: str) -> Iterator[bytes]:
        """Server sent events."""
        wire = self.pool.obtain(host)  # leak: a comment line that ends the stream returns with the wire
        if wire is None:
            return
        wire.send(f"GET {path} HTTP/1.1\r\nAccept: text/event-stream\r\n".encode())
        while chunk := wire.read():
            for line in chunk.splitlines():
                if line == b": end":
                    return
                yield line
        self.pool.restore(wire)

    def chunks(self, host: str, path: str) -> Iterator[bytes]:
        wire = self.pool.obtain(host)  # clean: restored however the iteration ends
        if wire is None:
            return
        try:
            wire.send(f"GET {path} HTTP/1.1\r\n".encode())
            while chunk := wire.read():
                if chunk == b"0\r\n":
                    return
                yield chunk
        finally:
            self.pool.restore(wire)


class WebhookSender:
    """Fires requests and collects the answers later."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.pending: dict[str, Response] = {}
        self.failed: list[str] = []

    def fire(self, hook_id: str, host: str, payload: dict) -> bool:
        body = json.dumps(payload).encode()
        resp = self.client.request("POST", host, f"/hooks/{hook_id}", body)  # clean: collect closes it
        if resp is None:
            self.failed.append(hook_id)
            return False
        if hook_id in self.pending:
            self.pending.pop(hook_id).close()
        self.pending[hook_id] = resp
        return True

    def collect(self) -> dict[str, int]:
        result = {}
        while self.pending:
            hook_id, resp = self.pending.popitem()
            result[hook_id] = resp.status
            resp.close()
        return result


def mirror(client: Client, host: str, paths: list[str], sink: dict[str, bytes]) -> int:
    n = 0
    for path in paths:
        resp = client.get_retry(host, path, 3)  # leak: a 404 goes on to the next path unclosed
        if resp is None:
            break
        if resp.status == 404:
            sink.pop(path, None)
            continue
        with resp:
            sink[path] = resp.read()
        n += 1
    return n
