"""Request-facing half: leases of tree nodes and token slots per request."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from .slots import TokenSlots
from .tree import Node, RadixTree


@dataclass
class ReqState:
    rid: str
    ids: tuple[int, ...]
    node: Optional[Node] = None
    prefix: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)


class PrefixCache:
    def __init__(self, slots: TokenSlots) -> None:
        self.slots = slots
        self.tree = RadixTree()
        self.reqs: dict[str, ReqState] = {}
        self.hit_tokens = 0
        self.pinned_system: list[Node] = []
        self.disabled = False

    def _alloc_or_evict(self, n: int) -> Optional[list[int]]:
        got = self.slots.alloc(n)  # clean: returned, or None
        if got is not None:
            return got
        for idx in self.tree.evict(n - self.slots.available()):
            self.slots.free(idx)
        return self.slots.alloc(n)  # clean: handed to the caller

    def start(self, st: ReqState) -> bool:
        node, hit = self.tree.match(st.ids)  # clean: kept in the request or unlocked on failure
        need = len(st.ids) - len(hit)
        own = self._alloc_or_evict(need)  # clean: kept in the request, finish frees or inserts it
        if own is None:
            self.tree.dec_lock_ref(node)
            return False
        st.node, st.prefix, st.own = node, hit, own
        self.reqs[st.rid] = st
        self.hit_tokens += len(hit)
        return True

    def start_disagg(self, st: ReqState, max_new: int) -> bool:
        """Reserve room for the answer as well; the prefix will come over the wire."""
        node, hit = self.tree.match(st.ids)  # leak: the node stays locked if slots are short
        own = self._alloc_or_evict(len(st.ids) - len(hit) + max_new)  # clean: kept in the request, or None
        if own is None:
            return False
        st.node, st.prefix, st.own = node, hit, own
        self.reqs[st.rid] = st
        return True

    def extend(self, rid: str) -> bool:
        more = self._alloc_or_evict(1)  # clean: joined to the request's own slots
        if more is None:
            return False
        self.reqs[rid].own.extend(more)
        return True

    def extend_many(self, rids: list[str]) -> list[str]:
        done = []
        batch = self._alloc_or_evict(len(rids))  # leak: slots of requests that have gone are dropped
        if batch is None:
            return done
        for rid, idx in zip(rids, batch):
            st = self.reqs.get(rid)
            if st is None:
                continue
            st.own.append(idx)
            done.append(rid)
        return done

    def extend_checked(self, rids: list[str]) -> list[str]:
        done = []
        batch = self._alloc_or_evict(len(rids))  # clean: unused slots are freed one by one
        if batch is None:
            return done
        for rid, idx in zip(rids, batch):
            st = self.reqs.get(rid)
            if st is None:
                self.slots.free([idx])
                continue
            st.own.append(idx)
            done.append(rid)
        return done

    # ---- end of life -----------------------------------------------------

    def finish(self, rid: str) -> None:
        st = self.reqs.pop(rid)
        if self.disabled:
            self.slots.free(st.own)
        else:
            there = self.tree.insert(st.ids, st.prefix + st.own[:len(st.ids) - len(st.prefix)])
            dup = max(0, there - len(st.prefix))
            tail = len(st.ids) - len(st.prefix)
            self.slots.free(st.own[:dup] + st.own[tail:])
        self.tree.dec_lock_ref(st.node)

    def abort_all(self) -> int:
        n = len(self.reqs)
        self.slots.group_begin()
        for st in self.reqs.values():
            self.slots.free(st.own)
            self.tree.dec_lock_ref(st.node)
        self.reqs.clear()
        self.slots.group_end()
        return n

    # ---- pinned prompts ----------------------------------------------------

    def pin_system_prompt(self, ids: tuple[int, ...]) -> int:
        node, hit = self.tree.match(ids)  # clean: near miss, unpin_system unlocks the list
        self.pinned_system.append(node)
        return len(hit)

    def unpin_system(self) -> None:
        for node in self.pinned_system:
            self.tree.dec_lock_ref(node)
        self.pinned_system.clear()

    def route_score(self, prompts: list[tuple[int, ...]]) -> float:
        """Share of the prompts' tokens that are cached here; asked by the router."""
        total = sum(map(len, prompts)) or 1
        score = 0
        for ids in prompts:
            node, hit = self.tree.match(ids)  # leak: locked once for every score asked
            score += len(hit)
        return score / total

    def touch(self, prompts: list[tuple[int, ...]]) -> bool:
        node = self.tree.longest(prompts)  # leak: the locked winner is only tested
        return node is not None and bool(node.key)
