"""Radix tree over token prefixes. Nodes own KV pages; a request locks the path it reads from.

    pages   come from PageArena.alloc()/free()
    locks   come from RadixTree.lock()/unlock(), counted on every node of a path
"""
import heapq
import itertools
import logging
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

log = logging.getLogger("radix")
_ticks = itertools.count()

class ArenaFull(MemoryError):
    pass

class PageArena:
    def __init__(self, total: int):
        self.total = total
        self._free = list(range(total))

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        pages, self._free = self._free[:n], self._free[n:]  # clean: returned to the caller
        return pages

    def must_alloc(self, n: int) -> List[int]:
        pages = self.alloc(n)  # clean: returned, there is nothing to hold where it is None
        if pages is None:
            raise ArenaFull(f"{n} pages of {self.total}")
        return pages

    def free(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)

class Node:
    __slots__ = ("key", "pages", "children", "parent", "locks", "last")

    def __init__(self, key: Tuple[int, ...], pages: List[int], parent: Optional["Node"]):
        self.key = key
        self.pages = pages
        self.children: Dict[int, "Node"] = {}
        self.parent = parent
        self.locks = 0
        self.last = next(_ticks)

    def __lt__(self, other: "Node") -> bool:
        return self.last < other.last

class Match(NamedTuple):
    node: Node
    length: int
    pages: List[int]

def common(a, b) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n

class RadixTree:
    def __init__(self, arena: PageArena):
        self.arena = arena
        self.root = Node((), [], None)

    def match(self, tokens: Tuple[int, ...]) -> Match:
        node, pages, done = self.root, [], 0
        while done < len(tokens):
            child = node.children.get(tokens[done])
            if child is None or common(child.key, tokens[done:]) < len(child.key):
                break
            child.last = next(_ticks)
            pages.extend(child.pages)
            done += len(child.key)
            node = child
        return Match(node, done, pages)

    def lock(self, node: Node) -> None:
        while node is not None:
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        while node is not None:
            node.locks -= 1
            node = node.parent

    def insert(self, node: Node, tokens: Tuple[int, ...], pages: List[int]) -> Tuple[Node, bool]:
        """Hang tokens under a node. False when that child is there already; then the pages stay the caller's."""
        if tokens[0] in node.children:
            return node.children[tokens[0]], False
        child = Node(tokens, pages, node)
        node.children[tokens[0]] = child
        return child, True

    def _leaves(self) -> List[Node]:
        out, stack = [], [self.root]
        while stack:
            cur = stack.pop()
            if cur.children:
                stack.extend(cur.children.values())
            elif cur is not self.root:
                out.append(cur)
        return out

    def evict(self, want: int) -> int:
        heap = [leaf for leaf in self._leaves() if leaf.locks == 0]
        heapq.heapify(heap)
        got = 0
        while heap and got < want:
            leaf = heapq.heappop(heap)
            parent = leaf.parent
            del parent.children[leaf.key[0]]
            self.arena.free(leaf.pages)
            got += len(leaf.pages)
            if not parent.children and parent.locks == 0 and parent is not self.root:
                heapq.heappush(heap, parent)
        return got

    def alloc_evicting(self, n: int) -> Optional[List[int]]:
        pages = self.arena.alloc(n)  # clean: it is rebound only where it is None
        if pages is None:
            self.evict(n)
            pages = self.arena.alloc(n)  # clean: returned to the caller
        return pages

class Request:
    def __init__(self, rid: str, tokens: List[int]):
        self.rid = rid
        self.tokens = tuple(tokens)
        self.node: Optional[Node] = None
        self.own_pages: List[int] = []
        self.prefix_len = 0
        self.priority = 0

class PrefillScheduler:
    def __init__(self, tree: RadixTree, max_running: int):
        self.tree = tree
        self.max_running = max_running
        self.running: Dict[str, Request] = {}
        self.parked: Dict[str, Request] = {}
        self.chunk: Dict[str, List[int]] = {}

    def start(self, req: Request) -> bool:
        m = self.tree.match(req.tokens)
        self.tree.lock(m.node)  # leak: the return for a full arena keeps the path locked
        rest = len(req.tokens) - m.length
        pages = self.tree.alloc_evicting(rest)  # clean: owned by the request, finish() or park() settles it
        if pages is None:
            log.info("%s waits for %d pages", req.rid, rest)
            return False
        req.node = m.node
        req.prefix_len = m.length
        req.own_pages = pages
        self.running[req.rid] = req
        return True

    def finish(self, rid: str) -> None:
        """Give the request's pages to the tree, then unlock its path."""
        req = self.running.pop(rid)
        rest, surplus = req.tokens[req.prefix_len:], req.own_pages
        if rest:
            _, taken = self.tree.insert(req.node, rest, req.own_pages[:len(rest)])
            if taken:
                surplus = req.own_pages[len(rest):]
        self.tree.arena.free(surplus)
        self.tree.unlock(req.node)

    def extend(self, rid: str, token: int) -> bool:
        req = self.running[rid]
        page = self.tree.alloc_evicting(1)  # clean: joins the request's own pages
        if page is None:
            return False
        req.own_pages += page
        req.tokens += (token,)
        return True

    def park(self, rid: str) -> None:
        """Lower priority: free the pages, keep the path locked until resume()."""
        req = self.running.pop(rid)
        self.tree.arena.free(req.own_pages)
        req.own_pages = []
        self.parked[rid] = req

    def resume(self, rid: str) -> bool:
        req = self.parked[rid]
        rest = len(req.tokens) - req.prefix_len
        pages = self.tree.alloc_evicting(rest)  # clean: the early return is where there are none
        if pages is None:
            return False
        req.own_pages = pages
        self.running[rid] = self.parked.pop(rid)
        return True

    def abort(self, rid: str) -> None:
        for table in (self.running, self.parked):
            req = table.pop(rid, None)
            if req is not None:
                self.tree.arena.free(req.own_pages)
                self.tree.unlock(req.node)
                return

    def stage_chunk(self, rid: str, n: int) -> bool:
        """Scratch pages for a prefill chunk that is computed out of order."""
        pages = self.tree.alloc_evicting(n)  # leak: a second chunk of the request overwrites the entry of the first
        if pages is None:
            return False
        self.chunk[rid] = pages
        return True

    def drop_chunk(self, rid: str) -> None:
        self.tree.arena.free(self.chunk.pop(rid, []))

def preload_system_prompts(tree: RadixTree, prompts: List[List[int]], compute) -> int:
    """Put system prompts into the tree before traffic comes."""
    n = 0
    for prompt in prompts:
        tokens = tuple(prompt)
        m = tree.match(tokens)
        rest = tokens[m.length:]
        if not rest:
            continue
        try:
            pages = tree.arena.must_alloc(len(rest))  # leak: insert() leaves the pages with us when the child exists, and its answer is not looked at
        except ArenaFull:
            log.warning("%d of %d system prompts loaded", n, len(prompts))
            break
        compute(rest, m.pages, pages)
        tree.insert(m.node, rest, pages)
        n += 1
    return n

def rescore(tree: RadixTree, requests: List[Request], scorer, floor: float) -> List[Request]:
    """Order waiting requests by score; the ones below the floor are left out."""
    kept = []
    for req in requests:
        m = tree.match(req.tokens)
        tree.lock(m.node)  # leak: one below the floor goes on without unlock
        score = scorer(m.length, len(req.tokens))
        if score < floor:
            continue
        req.priority = score
        kept.append(req)
        tree.unlock(m.node)
    return sorted(kept, key=lambda r: -r.priority)

def copy_branch(tree: RadixTree, src: Node, dst: Node, copy) -> Optional[Node]:
    """Duplicate a node's pages under another parent."""
    tree.lock(src)  # clean: near miss, both exits after it unlock
    pages = tree.alloc_evicting(len(src.pages))  # leak: the child that was there already keeps its own pages, ours are neither used nor freed
    if pages is None:
        tree.unlock(src)
        return None
    copy(src.pages, pages)
    child, _ = tree.insert(dst, src.key, pages)
    tree.unlock(src)
    return child
