import heapq
import threading
from typing import Any, Callable, Dict, List, Optional


class MetaSlots:
    """Small pinned records in which the prefill side leaves the first token of a request."""

    def __init__(self, size: int) -> None:
        self._heap = list(range(size))
        self._lock = threading.Lock()

    def alloc(self) -> Optional[int]:
        with self._lock:
            return heapq.heappop(self._heap) if self._heap else None

    def free(self, idx: int) -> None:
        with self._lock:
            heapq.heappush(self._heap, idx)


class PagePool:
    def __init__(self, pages: int) -> None:
        self._free: List[int] = list(range(pages))

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out = self._free[:n]
        del self._free[:n]
        return out

    def free(self, pages: List[int]) -> None:
        self._free.extend(pages)


class Link:
    def __init__(self, peer: str, sock: Any) -> None:
        self.peer = peer
        self.sock = sock
        self.refs = 0
        self.healthy = True


class LinkTable:
    """One link per peer, shared by the requests under way; closed with the last reference."""

    def __init__(self, connect: Callable[[str], Any]) -> None:
        self._connect = connect
        self._links: Dict[str, Link] = {}

    def get(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is None:
            link = Link(peer, self._connect(peer))
            self._links[peer] = link
        link.refs += 1
        return link

    def put(self, link: Link) -> None:
        link.refs -= 1
        if link.refs == 0:
            self._links.pop(link.peer, None)
            link.sock.close()
