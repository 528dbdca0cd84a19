from __future__ import annotations

from collections import deque
from typing import Any, Optional

from .host import DiskTier, HostArena
from .radix import Node, RadixTree


class Req:
    def __init__(self, rid: str, toks: tuple[int, ...]) -> None:
        self.rid = rid
        self.toks = toks
        self.node: Optional[Node] = None


class HiCacheController:
    def __init__(self, tree: RadixTree, arena: HostArena, disk: DiskTier, dev: Any, page_tokens: int) -> None:
        self.tree = tree
        self.arena = arena
        self.disk = disk
        self.dev = dev
        self.page_tokens = page_tokens
        self.running: dict[str, Req] = {}
        self._backups: deque[tuple[Node, Any]] = deque()

    def _pages(self, node: Node) -> int:
        return -(-len(node.key) // self.page_tokens)

    # requests

    def admit(self, req: Req) -> bool:
        node = self.tree.match_locked(req.toks)  # clean: near miss, unlocked when the device refuses, else by finish or retract
        if node is not None and not self.dev.can_load(node.key):
            self.tree.dec_lock(node)
            return False
        req.node = node
        self.running[req.rid] = req
        return True

    def finish(self, req: Req) -> None:
        self.running.pop(req.rid, None)
        if req.node is not None:
            self.tree.dec_lock(req.node)
            req.node = None

    def retract(self, req: Req) -> None:
        del self.running[req.rid]
        if req.node is not None:
            self.tree.dec_lock(req.node)
            req.node = None

    def advance(self, req: Req, ext: tuple[int, ...]) -> None:
        if not ext:
            return
        parent = req.node or self.tree.root
        child = parent.children.get(ext[0]) or self.tree.insert(parent, ext)
        self.tree.inc_lock(child)  # leak: the lock on the former node of the request is not let go when it moves down
        req.node = child

    def advance_locked(self, req: Req, ext: tuple[int, ...]) -> None:
        if not ext:
            return
        old = req.node
        parent = old or self.tree.root
        child = parent.children.get(ext[0]) or self.tree.insert(parent, ext)
        self.tree.inc_lock(child)  # clean: near miss, the former node is unlocked right after
        if old is not None:
            self.tree.dec_lock(old)
        req.node = child

    def prefix_len(self, toks: tuple[int, ...]) -> int:
        node = self.tree.match_locked(toks)  # leak: a prefix that lives on disk only returns 0 while locked
        if node is None:
            return 0
        if node.host is None:
            return 0
        n = 0
        cur: Optional[Node] = node
        while cur is not None:
            n += len(cur.key)
            cur = cur.parent
        self.tree.dec_lock(node)
        return n

    # write back

    def backup(self, node: Node) -> bool:
        if node.host is not None:
            return True
        self.tree.inc_lock(node)  # clean: near miss, unlocked without pages, otherwise when the copy is polled
        pages = self.arena.alloc(self._pages(node))  # clean: near miss, hangs on the node until evict_host
        if pages is None:
            self.tree.dec_lock(node)
            return False
        node.host = pages
        self._backups.append((node, self.dev.copy_out(node.key, self.arena.mem, pages.idx)))
        return True

    def poll(self) -> int:
        n = 0
        while self._backups and self._backups[0][1].query():
            node, _ = self._backups.popleft()
            self.tree.dec_lock(node)
            n += 1
        return n

    def evict_host(self, want: int) -> int:
        got = 0
        for node in self.tree.leaves():
            if got >= want:
                break
            if node.lock_ref or node.host is None:
                continue
            got += node.host.n
            self.arena.free(node.host)
            node.host = None
            if node.extent is None:
                self.tree.remove(node)
        return got

    def spill(self, node: Node) -> bool:
        if node.host is None or node.extent is not None or node.lock_ref:
            return False
        e = self.disk.store_padded(self.arena.mem[node.host.idx].tobytes())  # clean: near miss, kept on the node and returned by forget
        if e is None:
            return False
        node.extent = e
        self.arena.free(node.host)
        node.host = None
        return True

    def fetch(self, node: Node) -> bool:
        if node.extent is None or node.host is not None:
            return False
        pages = self.arena.alloc(self._pages(node))  # leak: a torn extent is forgotten and the fresh pages with it
        if pages is None:
            return False
        raw = self.disk.load(node.extent)
        if len(raw) < pages.n * self.arena.page_bytes:
            self.disk.return_extent(node.extent)
            node.extent = None
            return False
        for k, i in enumerate(pages.idx):
            page = raw[k * self.arena.page_bytes : (k + 1) * self.arena.page_bytes]
            self.arena.mem[i] = memoryview(page)
        node.host = pages
        return True

    def resnapshot(self, node: Node, blob: bytes) -> bool:
        e = self.disk.store(blob)  # leak: written over the extent of an earlier snapshot
        if e is None:
            return False
        node.extent = e
        return True

    def forget(self, node: Node) -> None:
        if node.lock_ref or node.children:
            return
        if node.host is not None:
            self.arena.free(node.host)
            node.host = None
        if node.extent is not None:
            self.disk.return_extent(node.extent)
            node.extent = None
        self.tree.remove(node)
