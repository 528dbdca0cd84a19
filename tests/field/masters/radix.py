"""Radix tree over token prefixes. Nodes own KV pages; requests lock the path that they use."""
from __future__ import annotations

import heapq
import time
from contextlib import contextmanager
from dataclasses import dataclass, field


class Pages:
    def __init__(self, n: int):
        self.free_list = list(range(n))

    def __len__(self):
        return len(self.free_list)

    def alloc(self, n: int) -> list[int] | None:
        if n > len(self.free_list):
            return None
        return [self.free_list.pop() for _ in range(n)]  # clean: there are enough, all are returned

    def alloc_striped(self, n: int, world: int, rank: int) -> list[int] | None:
        got, rest = [], []
        while self.free_list and len(got) < n:
            p = self.free_list.pop()  # leak: if there are too few, only the others' pages go back
            (got if p % world == rank else rest).append(p)
        self.free_list.extend(rest)
        return got if len(got) == n else None

    def free(self, pages) -> None:
        self.free_list.extend(pages)


class Node:
    __slots__ = ("key", "pages", "kids", "up", "locks", "last", "host")

    def __init__(self, key=(), pages=(), up=None):
        self.key, self.pages, self.up = tuple(key), list(pages), up
        self.kids: dict[int, Node] = {}
        self.locks, self.last, self.host = 0, time.monotonic(), None

    def __lt__(self, o):
        return self.last < o.last


def common(a, b) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


class Tree:
    def __init__(self, pages: Pages, host: Pages):
        self.pages, self.host, self.root = pages, host, Node()
        self.pins: dict[str, Node] = {}

    def match(self, toks) -> tuple[Node, list[int]]:
        node, got, i = self.root, [], 0
        while i < len(toks) and (kid := node.kids.get(toks[i])):
            n = common(kid.key, toks[i:])
            if n < len(kid.key):
                kid = self._split(kid, n)
            node, i = kid, i + n
            node.last = time.monotonic()
            got += node.pages
        return node, got

    def _split(self, kid: Node, n: int) -> Node:
        top = Node(kid.key[:n], kid.pages[:n], kid.up)
        top.locks, top.kids[kid.key[n]] = kid.locks, kid
        kid.up.kids[kid.key[0]] = top
        kid.key, kid.pages, kid.up = kid.key[n:], kid.pages[n:], top
        return top

    def lock(self, node: Node) -> Node:
        n = node
        while n is not self.root:
            n.locks += 1
            n = n.up
        return node

    def unlock(self, node: Node) -> None:
        while node is not self.root:
            node.locks -= 1
            node = node.up

    @contextmanager
    def locked(self, node: Node):
        self.lock(node)  # clean: unlocked in the finally
        try:
            yield node
        finally:
            self.unlock(node)

    def insert(self, toks, pages) -> int:
        """Returns how many of the pages the tree had before; those stay the caller's."""
        node, have = self.match(toks)
        if len(have) < len(toks):
            n = len(have)
            node.kids[toks[n]] = Node(toks[n:], pages[n:len(toks)], node)
        return len(have)

    def _leaves(self):
        stack = [self.root]
        while stack:
            n = stack.pop()
            stack += n.kids.values()
            if not n.kids and not n.locks and n is not self.root:
                yield n

    def evict(self, want: int) -> int:
        heap, done = list(self._leaves()), 0
        heapq.heapify(heap)
        while heap and done < want:
            n = heapq.heappop(heap)
            self.pages.free(n.pages)
            self.drop_host(n)
            done += len(n.pages)
            del n.up.kids[n.key[0]]
            if not n.up.kids and not n.up.locks and n.up is not self.root:
                heapq.heappush(heap, n.up)
        return done

    def back_up(self, node: Node) -> bool:
        if node.host is not None:
            return True
        h = self.host.alloc(len(node.pages))  # clean: the node has them until drop_host(), which evict() calls
        if h is None:
            return False
        node.host = h
        return True

    def drop_host(self, node: Node) -> None:
        h, node.host = node.host, None
        if h is not None:
            self.host.free(h)

    def pin(self, name: str, toks) -> None:
        self.unpin(name)
        self.pins[name] = self.lock(self.match(toks)[0])  # clean: near miss, the former one was unlocked, unpin() does the last

    def unpin(self, name: str) -> None:
        node = self.pins.pop(name, None)
        if node is not None:
            self.unlock(node)

    def export(self, toks, read) -> bytes:
        node, got = self.match(toks)
        self.lock(node)  # leak: a prefix that is only partly cached returns at once, locked
        if len(got) < len(toks):
            return b""
        try:
            return b"".join(read(p) for p in got)
        finally:
            self.unlock(node)


@dataclass
class Req:
    toks: list[int]
    out: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    node: Node | None = None
    prefix: int = 0
    done: int = 0

    @property
    def all(self):
        return self.toks + self.out


class Batcher:
    def __init__(self, tree: Tree, limit: int):
        self.tree, self.pages, self.limit = tree, tree.pages, limit
        self.waiting: list[Req] = []
        self.running: list[Req] = []

    def admit(self, req: Req) -> bool:
        node, hit = self.tree.match(req.toks)
        self.tree.lock(node)  # leak: without enough pages we return False and the path stays locked
        need = len(req.toks) - len(hit)
        if need > len(self.pages):
            self.tree.evict(need - len(self.pages))
        new = self.pages.alloc(need)  # leak: cache_chunk() replaces those that another request had inserted meanwhile
        if new is None:
            return False
        req.node, req.pages, req.prefix = node, hit + new, len(hit)
        self.running.append(req)
        return True

    def cache_chunk(self, req: Req) -> None:
        toks = req.toks[:req.done]
        self.tree.insert(toks, req.pages)
        node, now = self.tree.match(toks)
        self.tree.lock(node)  # clean: near miss, the old path is unlocked and finish() or retract() unlock this one
        self.tree.unlock(req.node)
        req.node, req.pages[:len(now)], req.prefix = node, now, len(now)

    def decode(self, req: Req, tok: int) -> bool:
        req.out.append(tok)
        p = self.pages.alloc(1)  # clean: near miss, in req.pages, and finish() or retract() give them to the tree or back
        if p is None:
            self.retract(req)
            return False
        req.pages += p
        return True

    def retract(self, req: Req) -> None:
        self.pages.free(req.pages[req.prefix:])
        self.tree.unlock(req.node)
        req.node, req.pages, req.prefix, req.done = None, [], 0, 0
        self.running.remove(req)
        self.waiting.insert(0, req)

    def finish(self, req: Req) -> None:
        toks = req.all
        have = self.tree.insert(toks, req.pages)
        self.pages.free(req.pages[req.prefix:have])
        self.tree.unlock(req.node)
        self.running.remove(req)

    def order(self) -> None:
        """Longest cached prefix first. Held while sorting, as splitting moves nodes about."""
        held, rank = [], {}
        try:
            for r in self.waiting:
                node, hit = self.tree.match(r.toks)
                held.append(self.tree.lock(node))  # clean: all of them are unlocked in the finally
                rank[id(r)] = len(hit)
            self.waiting.sort(key=lambda r: -rank[id(r)])
        finally:
            for n in held:
                self.tree.unlock(n)

    def fill(self) -> None:
        self.order()
        while self.waiting and len(self.running) < self.limit:
            if not self.admit(self.waiting[0]):
                break
            self.waiting.pop(0)

    def fork(self, req: Req, toks: list[int]) -> list[Req]:
        kids = {}
        for t in toks:
            node = self.tree.lock(req.node)  # leak: two samples with the same token leave one child and two locks
            kids[t] = Req(req.all + [t], node=node, prefix=req.prefix)
        return list(kids.values())

    def score(self, prompts, model):
        res = []
        for p in prompts:
            node, hit = self.tree.match(p)
            with self.tree.locked(node):  # clean: the context manager unlocks
                tmp = self.pages.alloc(len(p) - len(hit))  # clean: freed in the finally, unless there are none
                if tmp is None:
                    res.append(None)
                    continue
                try:
                    res.append(model.score(p, hit + tmp))
                finally:
                    self.pages.free(tmp)
        return res
