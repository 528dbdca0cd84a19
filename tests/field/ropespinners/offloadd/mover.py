"""Background moves between nodes."""
import logging
import socket
from collections import deque
from typing import Deque, List, Tuple

from .frames import Frame
from .store import PageStore

log = logging.getLogger(__name__)


class Mover:
    def __init__(self, store: PageStore):
        self.store = store
        self.jobs: Deque[Tuple[str, Frame, int, Tuple[str, int]]] = deque()

    def enqueue(self, key: str, addr: Tuple[str, int]) -> bool:
        ent = self.store.detach(key)  # clean: queued with its job, and run_one() pastes it
        if ent is None:
            return False
        self.jobs.append((key, ent[0], ent[1], addr))
        return True

    def run_one(self) -> bool:
        if not self.jobs:
            return False
        key, frame, n, addr = self.jobs.popleft()
        try:
            with socket.create_connection(addr, 10) as s:  # clean: with
                s.sendall(key.encode().ljust(64) + n.to_bytes(8, "big"))
                s.sendall(self.store.arena.view(frame)[:n])
            return True
        except OSError:
            log.warning("move of %s to %s failed", key, addr)
            return False
        finally:
            self.store.arena.paste(frame)

    def send_now(self, keys: List[str], conn: socket.socket) -> int:
        sent = 0
        for k in keys:
            ent = self.store.detach(k)  # leak: an empty entry is passed over without paste
            if ent is None:
                continue
            frame, n = ent
            if n == 0:
                continue
            conn.sendall(self.store.arena.view(frame)[:n])
            self.store.arena.paste(frame)
            sent += 1
        return sent
