from typing import List, Optional

from .conn import PeerCall, PeerPool
from .extents import allocate_extent, free_extent
from .store import BlobStore


class Replicator:
    def __init__(self, store: BlobStore, peers: PeerPool):
        self.store = store
        self.peers = peers

    def head(self, peer: str, name: str) -> Optional[int]:
        with PeerCall(self.peers, peer) as c:  # clean: with statement
            if c is None:
                return None
            c.request("HEAD", f"/b/{name}")
            r = c.getresponse()
            r.read()
            return int(r.headers.get("Content-Length", 0)) if r.status == 200 else None
        return None

    def pull(self, peer: str, name: str) -> bool:
        c = self.peers.dial(peer)  # leak: a 404 returns before hang_up
        if c is None:
            return False
        c.request("GET", f"/b/{name}")
        r = c.getresponse()
        data = r.read()
        if r.status == 404:
            return False
        self.peers.hang_up(peer, c)
        return self.store.add(name, data)

    def pull_into(self, peer: str, name: str, size: int) -> bool:
        e = allocate_extent(size)  # leak: no connection for the peer returns with the extent allocated
        if e is None:
            return False
        c = self.peers.dial(peer)  # clean: hung up before the status is looked at
        if c is None:
            return False
        c.request("GET", f"/b/{name}")
        r = c.getresponse()
        data = r.read()
        self.peers.hang_up(peer, c, keep=not r.will_close)
        if r.status != 200 or len(data) > e.nbytes or name in self.store.where:
            free_extent(e)
            return False
        self.store.mm[e.offset:e.offset + len(data)] = data
        self.store.where[name] = e
        self.store.length[name] = len(data)
        return True

    def push(self, peers: List[str], name: str, data: bytes) -> int:
        ok = 0
        for p in peers:
            c = self.peers.dial(p)  # clean: hung up on both ways
            if c is None:
                continue
            try:
                c.request("PUT", f"/b/{name}", body=data)
                c.getresponse().read()
            except OSError:
                self.peers.hang_up(p, c, keep=False)
                continue
            self.peers.hang_up(p, c)
            ok += 1
        return ok

    def announce(self, peers: List[str], name: str) -> List[str]:
        missed = []
        for p in peers:
            c = self.peers.dial(p)  # leak: OSError notes the peer and continues without hang_up
            if c is None:
                missed.append(p)
                continue
            try:
                c.request("POST", f"/have/{name}")
                c.getresponse().read()
            except OSError:
                missed.append(p)
                continue
            self.peers.hang_up(p, c)
        return missed
