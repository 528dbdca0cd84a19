from __future__ import annotations

from typing import List


class ConnectFailed(OSError):
    pass


class Connection:

    def __init__(self, addr: str) -> None:
        if not addr:
            raise ConnectFailed("no address")
        self.addr = addr
        self.healthy = True
        self.closed = False
        self.sent: List[bytes] = []

    def call(self, payload: bytes) -> bytes:
        if not self.healthy:
            raise ConnectionResetError(self.addr)
        self.sent.append(payload)
        return payload[::-1]

    def close(self) -> None:
        self.closed = True
