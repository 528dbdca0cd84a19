"""Speculative decoding: draft slots, logits scratch and token-tree nodes."""
from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Iterator, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class TreeNode:
    idx: int
    token: int = -1
    parent: Optional["TreeNode"] = None
    children: list["TreeNode"] = field(default_factory=list)


class NodePool:
    def __init__(self, capacity: int) -> None:
        self._spare = [TreeNode(i) for i in range(capacity)]

    def new(self, token: int, parent: Optional[TreeNode]) -> Optional[TreeNode]:
        if not self._spare:
            return None
        node = self._spare.pop()
        node.token, node.parent = token, parent
        return node

    def recycle(self, node: TreeNode) -> None:
        node.parent = None
        node.children = []
        self._spare.append(node)

    def recycle_tree(self, root: TreeNode) -> None:
        stack = [root]
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            self.recycle(node)


class DraftSlots:
    def __init__(self, n: int) -> None:
        self._free = set(range(n))

    def reserve(self) -> int:
        return self._free.pop() if self._free else -1

    def reserve_block(self, n: int) -> list[int]:
        got: list[int] = []
        while len(got) < n:
            slot = self.reserve()  # leak: a block that is short is dropped with what it got
            if slot < 0:
                return []
            got.append(slot)
        return got

    def restore(self, slot: int) -> None:
        self._free.add(slot)


class ScratchRing:
    def __init__(self, count: int, vocab: int) -> None:
        self._bufs = [torch.empty(vocab) for _ in range(count)]

    def pull(self) -> torch.Tensor:
        return self._bufs.pop()

    def push(self, buf: torch.Tensor) -> None:
        self._bufs.append(buf)

    @contextmanager
    def borrowed(self) -> Iterator[torch.Tensor]:
        buf = self.pull()  # clean: finally
        try:
            yield buf
        finally:
            self.push(buf)


@dataclass
class SpecState:
    seq_id: int
    slot: int = -1
    root: Optional[TreeNode] = None
    logits: Optional[torch.Tensor] = None


class SpecWorker:
    def __init__(self, draft, target, slots: DraftSlots, nodes: NodePool, ring: ScratchRing, depth: int) -> None:
        self.draft = draft
        self.target = target
        self.slots = slots
        self.nodes = nodes
        self.ring = ring
        self.depth = depth
        self._states: dict[int, SpecState] = {}

    def begin(self, seq_id: int) -> bool:
        slot = self.slots.reserve()  # clean: kept in the state, restored by end
        if slot < 0:
            return False
        self._states[seq_id] = SpecState(seq_id, slot)
        return True

    def propose(self, seq_id: int, last: int) -> Optional[TreeNode]:
        state = self._states[seq_id]
        root = self.nodes.new(last, None)  # leak: a tree not yet verified is overwritten in the state
        if root is None:
            return None
        self._expand(root)
        state.root = root
        return root

    def _expand(self, root: TreeNode) -> None:
        cur = root
        for token in self.draft.topk_chain(root.token, self.depth):
            node = self.nodes.new(token, cur)  # clean: near miss, a child of its parent and recycled with the tree
            if node is None:
                break
            cur.children.append(node)
            cur = node

    def verify(self, seq_id: int) -> list[int]:
        state = self._states[seq_id]
        if state.root is None:
            return []
        accepted = self.target.verify(state.slot, state.root)
        self.nodes.recycle_tree(state.root)
        state.root = None
        return accepted

    def propose_pruned(self, last: int, floor: float) -> list[int]:
        root = self.nodes.new(last, None)  # clean: recycled with its tree
        if root is None:
            return []
        for token, prob in self.draft.topk(last):
            node = self.nodes.new(token, root)  # leak: a node under the floor is never attached nor recycled
            if node is None:
                break
            if prob < floor:
                continue
            root.children.append(node)
        tokens = [c.token for c in root.children]
        self.nodes.recycle_tree(root)
        return tokens

    def sibling_tokens(self, last: int, width: int) -> list[int]:
        kept: list[TreeNode] = []
        for token, prob in self.draft.topk(last)[:width]:
            node = self.nodes.new(token, None)  # clean: near miss, recycled at once or in the last loop
            if node is None:
                break
            if prob <= 0.0:
                self.nodes.recycle(node)
                continue
            kept.append(node)
        tokens = [n.token for n in kept]
        for node in kept:
            self.nodes.recycle(node)
        return tokens

    def keep_logits(self, seq_id: int) -> None:
        state = self._states[seq_id]
        if state.logits is None:
            state.logits = self.ring.pull()  # clean: near miss, filled once and pushed by end
        self.target.logits_into(state.slot, state.logits)

    def entropy(self, slot: int) -> float:
        with self.ring.borrowed() as buf:  # clean: context manager
            self.target.logits_into(slot, buf)
            probs = torch.softmax(buf, dim=-1)
            return float(-(probs * probs.clamp_min(1e-9).log()).sum())

    def divergence(self, slot: int) -> Optional[float]:
        p = self.ring.pull()  # clean: pushed on both ways
        q = self.ring.pull()  # leak: the early return pushes only p
        self.target.logits_into(slot, p)
        if not self.draft.logits_into(slot, q):
            self.ring.push(p)
            return None
        value = float(torch.nn.functional.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="sum"))
        self.ring.push(p)
        self.ring.push(q)
        return value

    def run_group(self, seqs: list[int]) -> bool:
        got = self.slots.reserve_block(len(seqs))  # clean: near miss, each slot goes into a state of its own
        if not got:
            return False
        for seq_id, slot in zip(seqs, got):
            self._states[seq_id] = SpecState(seq_id, slot)
        return True

    def probe_draft(self, tokens: list[int]) -> Optional[float]:
        with ExitStack() as stack:
            slot = self.slots.reserve()  # clean: near miss, restored by the stack
            if slot < 0:
                return None
            stack.callback(self.slots.restore, slot)
            return self.draft.score(slot, tokens)

    def end(self, seq_id: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is None:
            return
        self.slots.restore(state.slot)
        if state.logits is not None:
            self.ring.push(state.logits)
            state.logits = None
        if state.root is not None:
            self.nodes.recycle_tree(state.root)
