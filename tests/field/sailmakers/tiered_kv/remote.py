from __future__ import annotations

import contextlib
import socket
from typing import Dict, Iterator, List, Optional

import torch


class RemoteLease:
    """A read lease on a remote object: the store will not evict it until expire()."""

    def __init__(self, store: "RemoteStore", key: str) -> None:
        self.store, self.key = store, key

    def fetch(self, into: torch.Tensor) -> bool:
        return self.store.rpc("GET", self.key, into)

    def expire(self) -> None:
        self.store.rpc("UNLEASE", self.key)


class RemoteStore:
    def __init__(self, addr, chans: int = 4) -> None:
        self.addr = addr
        self._chans: List[socket.socket] = []
        for _ in range(chans):
            self._chans.append(socket.create_connection(addr))  # clean: kept in self._chans, closed by close()

    @contextlib.contextmanager
    def channel(self) -> Iterator[socket.socket]:
        ch = self._chans.pop()  # clean: appended again in finally
        try:
            yield ch
        finally:
            self._chans.append(ch)

    def rpc(self, verb: str, key: str, into: Optional[torch.Tensor] = None) -> bool:
        with self.channel() as ch:  # clean: context manager
            ch.sendall(f"{verb} {key}\n".encode())
            status = ch.recv(4)
            if status != b"OKAY":
                return False
            if into is not None:
                ch.recv_into(memoryview(into.numpy()))
            return True

    def lease(self, key: str) -> Optional[RemoteLease]:
        if not self.rpc("LEASE", key):  # clean: handed to the caller inside RemoteLease
            return None
        return RemoteLease(self, key)

    def ping(self, timeout: float) -> bool:
        ch = self._chans.pop()  # leak: a wrong answer returns with the channel outside of self._chans
        ch.settimeout(timeout)
        ch.sendall(b"PING -\n")
        if ch.recv(4) != b"PONG":
            return False
        ch.settimeout(None)
        self._chans.append(ch)
        return True

    def stat_many(self, keys: List[str]) -> Dict[str, bool]:
        return {k: self.rpc("STAT", k) for k in keys}

    def close(self) -> None:
        while self._chans:
            self._chans.pop().close()  # clean: closed at once
