"""Radix prefix cache over token slots. A node with lock_ref > 0 may not be evicted."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Sequence, Tuple


class SlotPool:
    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)


class Node:
    def __init__(self, parent: Optional["Node"], token: int = -1, slot: int = -1) -> None:
        self.parent = parent
        self.token = token
        self.slot = slot
        self.children: Dict[int, Node] = {}
        self.lock_ref = 0
        self.last_access = time.monotonic()


@dataclass
class Request:
    rid: str
    tokens: List[int]
    slots: List[int] = field(default_factory=list)
    prefix_len: int = 0
    node: Optional[Node] = None


@dataclass
class ChatSession:
    session_id: str
    history: List[int] = field(default_factory=list)
    anchor: Optional[Node] = None
    tip: Optional[Node] = None


class RadixCache:
    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.root = Node(None)

    def match(self, tokens: Sequence[int]) -> Tuple[List[int], Node]:
        node, slots = self.root, []
        for token in tokens:
            nxt = node.children.get(token)
            if nxt is None:
                break
            nxt.last_access = time.monotonic()
            slots.append(nxt.slot)
            node = nxt
        return slots, node

    def inc_lock_ref(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent

    def dec_lock_ref(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock_ref -= 1
            cur = cur.parent

    def insert(self, tokens: Sequence[int], slots: Sequence[int]) -> int:
        """The tree takes over slots[overlap:]; slots[:overlap] stay with the caller."""
        _, node = self.match(tokens)
        overlap = 0
        cur = self.root
        while overlap < len(tokens) and tokens[overlap] in cur.children:
            cur = cur.children[tokens[overlap]]
            overlap += 1
        for token, slot in zip(tokens[overlap:], slots[overlap:]):
            child = Node(node, token, slot)
            node.children[token] = child
            node = child
        return overlap

    def evict(self, n: int) -> int:
        freed = 0
        while freed < n:
            leaf = self._oldest_leaf()
            if leaf is None:
                break
            del leaf.parent.children[leaf.token]
            self.pool.free([leaf.slot])
            freed += 1
        return freed

    def _oldest_leaf(self) -> Optional[Node]:
        best, stack = None, list(self.root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            elif node.lock_ref == 0 and (best is None or node.last_access < best.last_access):
                best = node
        return best

    def lock_path(self, tokens: Sequence[int]) -> Node:
        _, node = self.match(tokens)
        self.inc_lock_ref(node)  # clean: the locked node is handed to the caller
        return node


class PrefillScheduler:
    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.pool = cache.pool
        self.running: Dict[str, Request] = {}

    def schedule(self, req: Request) -> bool:
        if req.rid in self.running:
            return True
        slots, node = self.cache.match(req.tokens)
        self.cache.inc_lock_ref(node)  # leak: a request that gets no slots is sent back with the path still locked
        need = len(req.tokens) - len(slots)
        fresh = self.pool.alloc(need)  # clean: moves into req.slots, finish and retract free it
        if fresh is None:
            return False
        req.node, req.prefix_len = node, len(slots)
        req.slots = slots + fresh
        self.running[req.rid] = req
        return True

    def schedule_evicting(self, req: Request) -> int:
        if req.rid in self.running:
            return 0
        slots, node = self.cache.match(req.tokens)
        self.cache.inc_lock_ref(node)  # clean: near miss, unlocked on the path without slots, else kept in req.node
        need = len(req.tokens) - len(slots)
        fresh = self.pool.alloc(need)  # clean: near miss, a second attempt after eviction replaces only None
        if fresh is None:
            self.cache.evict(need - self.pool.available())
            fresh = self.pool.alloc(need)  # clean: None gives up, otherwise stored on the request
        if fresh is None:
            self.cache.dec_lock_ref(node)
            return 0
        req.node, req.prefix_len = node, len(slots)
        req.slots = slots + fresh
        self.running[req.rid] = req
        return need

    def decode_step(self, batch: Iterable[Request]) -> List[Request]:
        stalled = []
        for req in batch:
            slot = self.pool.alloc(1)  # clean: None goes to stalled, otherwise the request owns it
            if slot is None:
                stalled.append(req)
                continue
            req.slots.extend(slot)
            req.tokens.append(0)
        return stalled

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid)
        overlap = self.cache.insert(req.tokens, req.slots)
        self.pool.free(req.slots[req.prefix_len:overlap])
        self.cache.dec_lock_ref(req.node)

    def retract(self, rid: str) -> Request:
        req = self.running.pop(rid)
        self.pool.free(req.slots[req.prefix_len:])
        self.cache.dec_lock_ref(req.node)
        req.slots, req.node = [], None
        return req

    def warm_up(self, prompts: Iterable[Sequence[int]]) -> int:
        warmed = 0
        for prompt in prompts:
            slots = self.pool.alloc(len(prompt))  # leak: slots of the overlapping prefix stay with nobody, insert's result is ignored
            if slots is None:
                continue
            self.cache.insert(prompt, slots)
            warmed += 1
        return warmed


class SessionAnchors:
    """Keeps the history of live chats out of eviction's reach."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache

    def touch(self, session: ChatSession, turn: Sequence[int]) -> None:
        session.history.extend(turn)
        _, node = self.cache.match(session.history)
        self.cache.inc_lock_ref(node)  # leak: each turn overwrites session.tip, the older node stays locked
        session.tip = node

    def rebase(self, session: ChatSession, history: Sequence[int]) -> None:
        session.history = list(history)
        previous, session.anchor = session.anchor, self.cache.lock_path(history)  # clean: near miss, the swapped-out anchor is unlocked below
        if previous is not None:
            self.cache.dec_lock_ref(previous)

    def close(self, session: ChatSession) -> None:
        if session.anchor is not None:
            self.cache.dec_lock_ref(session.anchor)
            session.anchor = None
        if session.tip is not None:
            self.cache.dec_lock_ref(session.tip)
            session.tip = None


def score_prompts(cache: RadixCache, prompts: Sequence[Sequence[int]]) -> List[float]:
    scores = []
    for prompt in prompts:
        node = cache.lock_path(prompt)  # clean: near miss, the continue leaves through finally
        try:
            if not prompt:
                continue
            depth, cur = 0, node
            while cur.parent is not None:
                depth, cur = depth + 1, cur.parent
            scores.append(depth / len(prompt))
        finally:
            cache.dec_lock_ref(node)
    return scores


def longest_common(cache: RadixCache, prompts: Sequence[Sequence[int]]) -> Optional[Node]:
    best = None
    for prompt in prompts:
        node = cache.lock_path(prompt)  # leak: the root match continues without unlocking
        if node is cache.root:
            continue
        if best is None or node.last_access > best.last_access:
            best = node
        cache.dec_lock_ref(node)
    return best


def dump_path(cache: RadixCache, tokens: Sequence[int]) -> List[int]:
    node = cache.lock_path(tokens)  # leak: an unmatched path returns early with the lock held
    path: List[int] = []
    if node.token < 0:
        return path
    cur: Optional[Node] = node
    while cur is not None and cur.parent is not None:
        path.append(cur.token)
        cur = cur.parent
    cache.dec_lock_ref(node)
    return path[::-1]


if __name__ == "__main__":
    pool = SlotPool(32)
    cache = RadixCache(pool)
    sched = PrefillScheduler(cache)
    assert sched.schedule(Request("a", [1, 2, 3]))
    sched.finish("a")
    assert sched.schedule_evicting(Request("b", [1, 2, 4])) == 1
    sched.finish("b")
    chat = ChatSession("s")
    SessionAnchors(cache).rebase(chat, [1, 2])
    SessionAnchors(cache).close(chat)
    assert score_prompts(cache, [[1, 2, 4]]) == [1.0]
    assert cache.evict(99) == 4 and pool.available() == 32
