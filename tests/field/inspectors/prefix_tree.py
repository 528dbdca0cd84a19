"""Radix prefix cache over a flat pool of KV token slots."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch


class SlotTape:
    """Unused token slots kept as one index tensor."""

    def __init__(self, size: int) -> None:
        self._open = torch.arange(1, size + 1)

    def carve(self, need: int) -> Optional[torch.Tensor]:
        if need > self._open.numel():
            return None
        picked, self._open = self._open[:need], self._open[need:]
        return picked

    def mend(self, slots: torch.Tensor) -> None:
        self._open = torch.cat([self._open, slots])


@dataclass(eq=False)
class TreeNode:
    key: tuple = ()
    slots: Optional[torch.Tensor] = None
    parent: Optional["TreeNode"] = None
    kids: dict = field(default_factory=dict)
    pins: int = 0


class PrefixTree:
    def __init__(self, tape: SlotTape) -> None:
        self.tape = tape
        self.root = TreeNode()

    def locate(self, tokens: tuple) -> tuple[TreeNode, int]:
        node, depth = self.root, 0
        while depth < len(tokens) and tokens[depth] in node.kids:
            child = node.kids[tokens[depth]]
            if tokens[depth:depth + len(child.key)] != child.key:
                break
            node, depth = child, depth + len(child.key)
        return node, depth

    def pin(self, node: TreeNode) -> None:
        while node is not None:
            node.pins += 1
            node = node.parent

    def unpin(self, node: TreeNode) -> None:
        while node is not None:
            node.pins -= 1
            node = node.parent

    def graft(self, tokens: tuple, slots: torch.Tensor) -> TreeNode:
        """Adopt `slots` for the tail of `tokens`; the tree owns or mends them."""
        node, depth = self.locate(tokens)
        skip = slots.numel() - (len(tokens) - depth)
        if skip > 0:
            self.tape.mend(slots[:skip])
            slots = slots[skip:]
        if slots.numel() == 0 or tokens[depth] in node.kids:
            self.tape.mend(slots)
            return node
        leaf = TreeNode(tokens[depth:], slots, node)
        node.kids[tokens[depth]] = leaf
        return leaf

    def shed(self) -> None:
        """Drop every unpinned leaf."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            for head, kid in list(node.kids.items()):
                if kid.pins == 0 and not kid.kids:
                    self.tape.mend(kid.slots)
                    del node.kids[head]
                else:
                    stack.append(kid)


@dataclass(eq=False)
class Req:
    tokens: tuple
    node: Optional[TreeNode] = None
    own: Optional[torch.Tensor] = None


class PrefillAdder:
    def __init__(self, tree: PrefixTree, tape: SlotTape) -> None:
        self.tree, self.tape = tree, tape
        self.running: list[Req] = []

    def admit(self, req: Req) -> bool:
        node, cached = self.tree.locate(req.tokens)
        self.tree.pin(node)  # leak: a refused request leaves its prefix pinned
        own = self.tape.carve(len(req.tokens) - cached)  # clean: None-checked, then stored in req.own
        if own is None:
            return False
        req.node, req.own = node, own
        self.running.append(req)
        return True

    def admit_first_chunk(self, req: Req, budget: int) -> int:
        node, cached = self.tree.locate(req.tokens)
        self.tree.pin(node)  # clean: near miss, unpinned when refused, else moves to req.node
        take = min(budget, len(req.tokens) - cached)
        own = self._carve_or_shed(take)  # clean: stored in req.own for finish() or abort()
        if own is None:
            self.tree.unpin(node)
            return 0
        req.node, req.own = node, own
        self.running.append(req)
        return take

    def _carve_or_shed(self, need: int) -> Optional[torch.Tensor]:
        got = self.tape.carve(need)  # clean: near miss, second carve only follows None
        if got is None:
            self.tree.shed()
            got = self.tape.carve(need)  # clean: handed to the caller
        return got

    def cache_unfinished(self, req: Req, done: int) -> None:
        """Publish the finished chunk and move the request under its leaf."""
        leaf = self.tree.graft(req.tokens[:done], req.own)
        self.tree.pin(leaf)  # leak: overwrites req.node without unpinning the previous node
        req.node = leaf
        req.own = torch.empty(0, dtype=torch.long)

    def rehome(self, req: Req) -> None:
        node, _ = self.tree.locate(req.tokens)
        self.tree.pin(node)  # clean: near miss, the old node is unpinned after the new
        old, req.node = req.node, node
        self.tree.unpin(old)

    def speculate(self, req: Req, verifier, width: int) -> int:
        draft = self._carve_or_shed(width)  # leak: accepting nothing returns without mending
        if draft is None:
            return 0
        accepted = verifier(req, draft)
        if accepted == 0:
            return 0
        req.own = torch.cat([req.own, draft[:accepted]])
        self.tape.mend(draft[accepted:])
        return accepted

    def finish(self, req: Req) -> None:
        self.running.remove(req)
        self.tree.graft(req.tokens, req.own)
        self.tree.unpin(req.node)

    def abort(self, req: Req) -> None:
        self.running.remove(req)
        self.tape.mend(req.own)
        self.tree.unpin(req.node)
