"""Radix prefix cache with reference counted nodes."""

import heapq
import time
from typing import Dict, Iterator, List, Optional, Tuple

import torch


class TokenPool:
    def __init__(self, size: int):
        self.free_slots = torch.arange(size, dtype=torch.int64)

    def available(self) -> int:
        return self.free_slots.numel()

    def alloc(self, n: int) -> Optional[torch.Tensor]:
        if n > self.free_slots.numel():
            return None
        picked = self.free_slots[:n]
        self.free_slots = self.free_slots[n:]
        return picked

    def dealloc(self, idx: torch.Tensor) -> None:
        self.free_slots = torch.cat((self.free_slots, idx))


class Node:
    __slots__ = ("children", "key", "value", "parent", "ref", "stamp")

    def __init__(self, key: Tuple[int, ...], value: Optional[torch.Tensor], parent: Optional["Node"]):
        self.children: Dict[int, "Node"] = {}
        self.key = key
        self.value = value
        self.parent = parent
        self.ref = 0
        self.stamp = time.monotonic()

    def __lt__(self, other: "Node") -> bool:
        return self.stamp < other.stamp


def _common(a, b) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


class RadixCache:
    def __init__(self, pool: TokenPool):
        self.pool = pool
        self.root = Node((), None, None)

    def inc_ref(self, node: Node) -> None:
        while node is not self.root:
            node.ref += 1
            node = node.parent

    def dec_ref(self, node: Node) -> None:
        while node is not self.root:
            node.ref -= 1
            node = node.parent

    def match(self, tokens: List[int]) -> Tuple[Node, int]:
        node, done = self.root, 0
        while done < len(tokens) and tokens[done] in node.children:
            child = node.children[tokens[done]]
            n = _common(child.key, tokens[done:])
            if n < len(child.key):
                break
            node, done = child, done + n
        node.stamp = time.monotonic()
        return node, done

    def insert(self, tokens: List[int], slots: torch.Tensor) -> Node:
        node, done = self.match(tokens)
        if done == len(tokens) or tokens[done] in node.children:
            self.pool.dealloc(slots)
            return node
        extra = slots.numel() - (len(tokens) - done)
        if extra > 0:
            self.pool.dealloc(slots[:extra])
            slots = slots[extra:]
        child = Node(tuple(tokens[done:]), slots, node)
        node.children[tokens[done]] = child
        return child

    def leaves(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            n = stack.pop()
            if not n.children and n is not self.root:
                yield n
            stack.extend(n.children.values())

    def evict(self, want: int) -> int:
        heap = [n for n in self.leaves() if n.ref == 0]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < want:
            n = heapq.heappop(heap)
            self.pool.dealloc(n.value)
            freed += n.value.numel()
            del n.parent.children[n.key[0]]
        return freed

    def clear(self) -> None:
        stack = [self.root]
        while stack:
            n = stack.pop()
            stack.extend(n.children.values())
            if n.value is not None:
                self.pool.dealloc(n.value)
        self.root = Node((), None, None)


class PrefillJob:
    def __init__(self, rid: str, tokens: List[int]):
        self.rid = rid
        self.tokens = tokens
        self.node: Optional[Node] = None
        self.slots: Optional[torch.Tensor] = None


class PrefillPlanner:
    def __init__(self, cache: RadixCache, pool: TokenPool, budget: int):
        self.cache, self.pool, self.budget = cache, pool, budget
        self.running: Dict[str, PrefillJob] = {}

    def admit(self, job: PrefillJob) -> bool:
        node, hit = self.cache.match(job.tokens)
        self.cache.inc_ref(node)  # clean: near miss, dropped again on refusal and otherwise kept in the job until finish
        slots = self.pool.alloc(len(job.tokens) - hit)  # clean: stored in the job, finish inserts or frees it
        if slots is None:
            self.cache.dec_ref(node)
            return False
        job.node, job.slots = node, slots
        self.running[job.rid] = job
        return True

    def admit_with_evict(self, job: PrefillJob) -> bool:
        node, hit = self.cache.match(job.tokens)
        self.cache.inc_ref(node)  # leak: the second refusal returns with the node still pinned
        need = len(job.tokens) - hit
        slots = self.pool.alloc(need)  # clean: kept in the job when not None
        if slots is None:
            self.cache.evict(need)
            slots = self.pool.alloc(need)  # clean: kept in the job when not None
            if slots is None:
                return False
        job.node, job.slots = node, slots
        self.running[job.rid] = job
        return True

    def finish(self, rid: str, keep: bool) -> None:
        job = self.running.pop(rid)
        if keep:
            self.cache.insert(job.tokens, job.slots)
        else:
            self.pool.dealloc(job.slots)
        self.cache.dec_ref(job.node)

    def peek(self, tokens: List[int]) -> int:
        node, hit = self.cache.match(tokens)
        self.cache.inc_ref(node)  # clean: released in the finally
        try:
            if hit == 0:
                return 0
            return hit + len(node.children)
        finally:
            self.cache.dec_ref(node)

    def warm(self, prompts: List[List[int]]) -> int:
        done = 0
        for p in prompts:
            slots = self.pool.alloc(len(p))  # leak: over budget prompts are skipped with their slots held
            if slots is None:
                break
            if len(p) > self.budget:
                continue
            self.cache.insert(p, slots)
            done += 1
        return done

    def score(self, prompts: List[List[int]]) -> List[int]:
        hits = []
        for p in prompts:
            node, hit = self.cache.match(p)
            self.cache.inc_ref(node)  # leak: an incomplete hit breaks out before the count is dropped
            if hit < len(p):
                break
            hits.append(hit)
            self.cache.dec_ref(node)
        return hits
