"""Prefix cache: a radix tree over token ids that owns KV slots.

Slots are rows of the KV tensors.  They belong either to a request or to a
node of the tree.  Nodes which running requests depend on are locked, from the
node up to the root; only leaves without locks may be evicted.
"""
import heapq
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Sequence, Tuple

logger = logging.getLogger("radix")


class SlotPool:
    """Rows of one KV tensor."""

    def __init__(self, size: int):
        self._free: List[int] = list(range(size - 1, -1, -1))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]  # clean: the rows go to the caller

    def alloc_page(self, page: int) -> Optional[List[int]]:
        """`page` consecutive rows that start at a multiple of `page`."""
        self._free.sort(reverse=True)
        run: List[int] = []
        while self._free:
            row = self._free.pop()  # leak: rows before the aligned run are forgotten when run is started afresh
            if row % page == 0:
                run = [row]
            elif run and row == run[-1] + 1:
                run.append(row)
            else:
                run = []
            if len(run) == page:
                return run
        self._free.extend(run)
        return None

    def free(self, rows: Sequence[int]) -> None:
        self._free.extend(rows)


@dataclass(eq=False)
class Node:
    key: Tuple[int, ...] = ()
    slots: List[int] = field(default_factory=list)
    host: Optional[List[int]] = None
    parent: Optional["Node"] = None
    children: Dict[int, "Node"] = field(default_factory=dict)
    locks: int = 0
    touched: float = 0.0

    def __lt__(self, other: "Node") -> bool:
        return self.touched < other.touched


class RadixTree:
    def __init__(self, pool: SlotPool, host: SlotPool, copy_out: Callable[[List[int], List[int]], None]):
        self.pool = pool
        self.host = host
        self.copy_out = copy_out
        self.root = Node(locks=1)

    # -- lookup ------------------------------------------------------------

    def match(self, tokens: Sequence[int]) -> Tuple[Node, List[int]]:
        """Deepest node whose path is a prefix of tokens, and the rows of the path."""
        node, rows, at = self.root, [], 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None or tuple(tokens[at:at + len(child.key)]) != child.key:
                break
            child.touched = time.monotonic()
            rows.extend(child.slots)
            at += len(child.key)
            node = child
        return node, rows

    def lock(self, node: Node) -> Node:
        step: Optional[Node] = node
        while step is not None:
            step.locks += 1
            step = step.parent
        return node

    def unlock(self, node: Node) -> None:
        step: Optional[Node] = node
        while step is not None:
            step.locks -= 1
            step = step.parent

    @contextmanager
    def locked(self, node: Node):
        self.lock(node)  # clean: the finally
        try:
            yield node
        finally:
            self.unlock(node)

    # -- change ------------------------------------------------------------

    def insert(self, tokens: Sequence[int], slots: List[int]) -> int:
        """Give rows to the tree.

        slots[i] belongs to tokens[i].  Returns how many of the leading rows
        were not taken because the tree had that prefix already.
        """
        node, rows = self.match(tokens)
        have = len(rows)
        if have < len(tokens):
            first = tokens[have]
            if first not in node.children:
                leaf = Node(tuple(tokens[have:]), list(slots[have:]), parent=node, touched=time.monotonic())
                node.children[first] = leaf
            else:
                return len(tokens)  # diverges inside a child, which this version does not split
        return have

    def evict(self, wanted: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.locks == 0]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < wanted:
            node = heapq.heappop(leaves)
            self._back_up(node)
            self.pool.free(node.slots)
            freed += len(node.slots)
            parent = node.parent
            del parent.children[node.key[0]]
            if not parent.children and parent.locks == 0:
                heapq.heappush(leaves, parent)
        return freed

    def _back_up(self, node: Node) -> bool:
        """Copy the rows of a node to host memory before they are reused."""
        rows = self.host.alloc(len(node.slots))  # leak: evict deletes the node from the tree right after, nobody frees node.host
        if rows is None:
            return False
        self.copy_out(node.slots, rows)
        node.host = rows
        return True

    def _walk(self, node: Node):
        for child in node.children.values():
            yield child
            yield from self._walk(child)


@dataclass(eq=False)
class Request:
    rid: str
    tokens: List[int]
    prefix: List[int] = field(default_factory=list)
    own: List[int] = field(default_factory=list)
    node: Optional[Node] = None


class PrefixScheduler:
    def __init__(self, tree: RadixTree):
        self.tree = tree
        self.pool = tree.pool
        self.retracted: List[Request] = []

    def begin(self, req: Request) -> bool:
        node, req.prefix = self.tree.match(req.tokens)
        self.tree.lock(node)  # leak: when even eviction does not make room, begin returns False with the path locked
        need = len(req.tokens) - len(req.prefix)
        rows = self._alloc_or_evict(need)  # clean: None or owned by the request
        if rows is None:
            return False
        req.node = node
        req.own = rows
        return True

    def _alloc_or_evict(self, n: int) -> Optional[List[int]]:
        rows = self.pool.alloc(n)  # clean: returned, or None
        if rows is None and self.tree.evict(n - self.pool.available()):
            rows = self.pool.alloc(n)  # clean: near miss, only when the first one was None
        return rows

    def extend(self, req: Request, token: int) -> bool:
        rows = self._alloc_or_evict(1)  # clean: None or appended to the rows of the request
        if rows is None:
            self.retract(req)
            return False
        req.own.extend(rows)
        req.tokens.append(token)
        return True

    def speculate(self, req: Request, draft: List[int], verify: Callable[[Request, List[int]], int]) -> int:
        rows = self._alloc_or_evict(len(draft))  # clean: near miss, the accepted part moves to the request, the rest is freed
        if rows is None:
            return 0
        accepted = verify(req, rows)
        self.pool.free(rows[accepted:])
        req.own.extend(rows[:accepted])
        req.tokens.extend(draft[:accepted])
        return accepted

    def retract(self, req: Request) -> None:
        self.pool.free(req.own)
        req.own = []
        if req.node is not None:
            self.tree.unlock(req.node)
            req.node = None
        self.retracted.append(req)

    def finish(self, req: Request) -> None:
        rows = req.prefix + req.own
        kept_back = self.tree.insert(req.tokens, rows)
        self.pool.free(rows[len(req.prefix):kept_back])
        req.own = []
        self.tree.unlock(req.node)
        req.node = None

    def score(self, tokens: Sequence[int], fn: Callable[[List[int]], float]) -> float:
        node, rows = self.tree.match(tokens)
        with self.tree.locked(node):  # clean: with block
            return fn(rows)


class ChunkedPrefill:
    """Long prompts: chunk by chunk into the tree, so that others can share early."""

    def __init__(self, sched: PrefixScheduler, tokens: List[int], chunk: int = 2048):
        self.sched = sched
        self.tree = sched.tree
        self.tokens = tokens
        self.chunk = chunk
        self.node, rows = self.tree.match(tokens)
        self.tree.lock(self.node)  # leak: advance() rebinds node to the deeper one, only the last gets unlocked
        self.done = len(rows)
        self.rows = rows

    def advance(self, run: Callable[[List[int], List[int]], None]) -> bool:
        """One chunk; False when there was no room."""
        upto = min(len(self.tokens), self.done + self.chunk)
        fresh = self.sched._alloc_or_evict(upto - self.done)  # leak: what insert() does not take is not freed, its return value is ignored
        if fresh is None:
            return False
        run(self.tokens[self.done:upto], fresh)
        self.tree.insert(self.tokens[:upto], self.rows + fresh)
        node, self.rows = self.tree.match(self.tokens[:upto])
        self.node = self.tree.lock(node)  # leak: replaced by that of the next chunk
        self.done = upto
        return True

    def close(self) -> None:
        if self.node is not None:
            self.tree.unlock(self.node)
            self.node = None
