import threading
import time
from typing import Dict, List, Optional, Tuple

import torch


class PageArena:
    """Registered send/receive pages, handed out in runs."""

    def __init__(self, pages: int, page_elems: int):
        self.data = torch.zeros(pages, page_elems)
        self._free: List[int] = list(range(pages))
        self._cv = threading.Condition()

    def get_pages(self, n: int) -> List[int]:
        with self._cv:
            while len(self._free) < n:
                self._cv.wait()
            out, self._free = self._free[:n], self._free[n:]
            return out

    def try_get_pages(self, n: int) -> Optional[List[int]]:
        with self._cv:
            if len(self._free) < n:
                return None
            out, self._free = self._free[:n], self._free[n:]
            return out

    def put_pages(self, pages: List[int]) -> None:
        with self._cv:
            self._free.extend(pages)
            self._cv.notify_all()


class Channel:
    def __init__(self, peer: str):
        self.peer = peer
        self.sent = 0

    def send(self, t: torch.Tensor) -> bool:
        self.sent += t.numel()
        return True


class ChannelCache:
    def __init__(self, limit: int = 8):
        self._idle: Dict[str, List[Channel]] = {}
        self.limit = limit

    def open_channel(self, peer: str) -> Channel:
        idle = self._idle.get(peer)
        return idle.pop() if idle else Channel(peer)

    def close_channel(self, ch: Channel) -> None:
        self._idle.setdefault(ch.peer, []).append(ch)
