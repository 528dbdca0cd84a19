import http.client
from collections import defaultdict
from typing import Dict, List, Optional


class PeerPool:
    """Keep-alive connections by peer, limited in total."""

    def __init__(self, limit: int):
        self.limit = limit
        self.out = 0
        self._kept: Dict[str, List[http.client.HTTPConnection]] = defaultdict(list)

    def dial(self, peer: str) -> Optional[http.client.HTTPConnection]:
        if self.out >= self.limit:
            return None
        self.out += 1
        kept = self._kept[peer]
        return kept.pop() if kept else http.client.HTTPConnection(peer, timeout=10)

    def hang_up(self, peer: str, c: http.client.HTTPConnection, keep: bool = True) -> None:
        self.out -= 1
        if keep:
            self._kept[peer].append(c)
        else:
            c.close()


class PeerCall:
    def __init__(self, pool: PeerPool, peer: str):
        self.pool = pool
        self.peer = peer
        self.c: Optional[http.client.HTTPConnection] = None

    def __enter__(self) -> Optional[http.client.HTTPConnection]:
        self.c = self.pool.dial(self.peer)  # clean: hung up in __exit__, kept or not
        return self.c

    def __exit__(self, et, ev, tb) -> bool:
        if self.c is None:
            return False
        self.pool.hang_up(self.peer, self.c, keep=et is None)
        self.c = None
        return et is not None and issubclass(et, ConnectionError)
