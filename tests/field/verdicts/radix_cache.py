import heapq
import time
from collections import defaultdict
from typing import List, Optional, Tuple

import torch


class TokenToKVPool:
    def __init__(self, size: int):
        self.size = size
        self.free_list = torch.arange(size)

    def available(self) -> int:
        return int(self.free_list.numel())

    def alloc(self, need: int) -> Optional[torch.Tensor]:
        if need > self.free_list.numel():
            return None
        sel, self.free_list = self.free_list[:need], self.free_list[need:]
        return sel

    def dealloc(self, idx: torch.Tensor) -> None:
        self.free_list = torch.cat([self.free_list, idx])


class TreeNode:
    def __init__(self):
        self.children = defaultdict(TreeNode)
        self.parent: Optional["TreeNode"] = None
        self.key: List[int] = []
        self.value: Optional[torch.Tensor] = None
        self.lock_ref = 0
        self.last_access = time.monotonic()

    def __lt__(self, other):
        return self.last_access < other.last_access


class RadixCache:
    def __init__(self, kv_pool: TokenToKVPool, disable: bool = False):
        self.kv_pool = kv_pool
        self.disable = disable
        self.root = TreeNode()
        self.root.lock_ref = 1

    def inc_lock_ref(self, node: TreeNode) -> None:
        while node is not None and node is not self.root:
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        while node is not None and node is not self.root:
            node.lock_ref -= 1
            node = node.parent

    def match(self, key: List[int]) -> Tuple[int, TreeNode]:
        node, n = self.root, 0
        while n < len(key) and key[n] in node.children:
            node = node.children[key[n]]
            n += len(node.key)
        node.last_access = time.monotonic()
        return n, node

    def insert(self, node: TreeNode, key: List[int], value: torch.Tensor) -> TreeNode:
        if key[0] in node.children:
            self.kv_pool.dealloc(value)
            return node.children[key[0]]
        child = TreeNode()
        child.parent, child.key, child.value = node, key, value
        node.children[key[0]] = child
        return child

    def evict(self, want: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.lock_ref == 0]
        heapq.heapify(leaves)
        done = 0
        while leaves and done < want:
            n = heapq.heappop(leaves)
            self.kv_pool.dealloc(n.value)
            done += n.value.numel()
            n.parent.children.pop(n.key[0])
        return done

    def _walk(self, node):
        for c in list(node.children.values()):
            yield c
            yield from self._walk(c)


class Req:
    def __init__(self, rid: str, ids: List[int]):
        self.rid = rid
        self.ids = ids
        self.last_node: Optional[TreeNode] = None
        self.kv: Optional[torch.Tensor] = None
        self.prefix_len = 0


class PrefillAdder:
    def __init__(self, cache: RadixCache, budget: int):
        self.cache = cache
        self.pool = cache.kv_pool
        self.budget = budget
        self.batch: List[Req] = []

    def alloc_with_evict(self, need: int) -> Optional[torch.Tensor]:
        got = self.pool.alloc(need)  # clean: near miss, overwritten only when it is None
        if got is None:
            self.cache.evict(need)
            got = self.pool.alloc(need)  # clean: returned, None included
        return got

    def add(self, req: Req) -> bool:
        n, node = self.cache.match(req.ids)
        self.cache.inc_lock_ref(node)  # clean: near miss, dropped on refusal, else kept in last_node and dropped by finish
        kv = self.alloc_with_evict(len(req.ids) - n)  # clean: stored in the request, finish deallocates or inserts it
        if kv is None:
            self.cache.dec_lock_ref(node)
            return False
        req.last_node, req.kv, req.prefix_len = node, kv, n
        self.batch.append(req)
        return True

    def add_budgeted(self, req: Req) -> bool:
        n, node = self.cache.match(req.ids)
        self.cache.inc_lock_ref(node)  # leak: the over-budget return keeps the path locked
        need = len(req.ids) - n
        if need > self.budget:
            return False
        kv = self.alloc_with_evict(need)  # clean: None refused, otherwise stored in the request
        if kv is None:
            self.cache.dec_lock_ref(node)
            return False
        self.budget -= need
        req.last_node, req.kv, req.prefix_len = node, kv, n
        self.batch.append(req)
        return True

    def finish(self, req: Req, keep: bool) -> None:
        if keep and req.kv.numel() > 0:
            self.cache.insert(req.last_node, req.ids[req.prefix_len :], req.kv)
        else:
            self.pool.dealloc(req.kv)
        self.cache.dec_lock_ref(req.last_node)
        req.kv = req.last_node = None

    def insert_prompt(self, ids: List[int]) -> Optional[TreeNode]:
        n, node = self.cache.match(ids)
        kv = self.alloc_with_evict(len(ids) - n)  # leak: a disabled cache returns after the tokens were allocated
        if kv is None or self.cache.disable:
            return None
        return self.cache.insert(node, ids[n:], kv)

    def insert_prompt_checked(self, ids: List[int]) -> Optional[TreeNode]:
        n, node = self.cache.match(ids)
        kv = self.alloc_with_evict(len(ids) - n)  # clean: near miss, the full match gives an empty tensor which is deallocated
        if kv is None:
            return None
        if kv.numel() == 0 or self.cache.disable:
            self.pool.dealloc(kv)
            return node
        return self.cache.insert(node, ids[n:], kv)

    def peek_score(self, ids: List[int], scorer) -> float:
        n, node = self.cache.match(ids)
        self.cache.inc_lock_ref(node)  # clean: dropped in finally
        try:
            return scorer(node.value) if n else 0.0
        finally:
            self.cache.dec_lock_ref(node)

    def longest(self, prompts: List[List[int]]) -> Optional[TreeNode]:
        best, best_n = None, -1
        for p in prompts:
            n, node = self.cache.match(p)
            self.cache.inc_lock_ref(node)  # leak: every looked-at node stays locked, only the last best is dropped
            if n > best_n:
                best, best_n = node, n
        if best is not None:
            self.cache.dec_lock_ref(best)
        return best

    def scratch_forward(self, n: int, fwd) -> Optional[torch.Tensor]:
        idx = self.pool.alloc(n)  # leak: deallocates a slice without the last index
        if idx is None:
            return None
        out = fwd(idx)
        self.pool.dealloc(idx[:-1])
        return out

    def chunked(self, req: Req, chunk: int) -> int:
        done = 0
        while done < len(req.ids):
            part = self.pool.alloc(min(chunk, len(req.ids) - done))  # leak: concatenation is dropped when the pool runs out and the method raises
            if part is None:
                raise RuntimeError(f"{req.rid}: out of KV after {done} tokens")
            req_part = part if done == 0 else torch.cat([req_part, part])
            done += part.numel()
        req.kv = req_part
        return done
