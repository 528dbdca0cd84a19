"""Speculative decoding: draft slots, draft trees and the verify step."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Tuple

import torch

log = logging.getLogger(__name__)


class SlotRing:
    """Scratch KV rows for draft tokens."""

    def __init__(self, rows: int) -> None:
        self._idle: List[int] = list(range(rows))

    def grab(self, n: int) -> Optional[List[int]]:
        if n > len(self._idle):
            return None
        return [self._idle.pop() for _ in range(n)]

    def drop(self, rows: List[int]) -> None:
        self._idle.extend(rows)


class HiddenPool:
    """Buffers for the hidden states which the draft head reads."""

    def __init__(self, width: int, count: int) -> None:
        self.width = width
        self._bufs = [torch.empty(64, width) for _ in range(count)]

    def lend(self) -> torch.Tensor:
        if self._bufs:
            return self._bufs.pop()
        return torch.empty(64, self.width)

    def restore(self, t: torch.Tensor) -> None:
        self._bufs.append(t)


@dataclass
class Proposal:
    tokens: List[int]
    rows: List[int]


@dataclass
class TreeNode:
    token: int
    rows: List[int]
    score: float
    children: List["TreeNode"] = field(default_factory=list)


class Drafter:
    def __init__(self, ring: SlotRing, hidden: HiddenPool, k: int = 4) -> None:
        self.ring = ring
        self.hidden = hidden
        self.k = k
        self.ngrams: Dict[Tuple[int, ...], List[int]] = {}

    def _draft_token(self, ctx: List[int]) -> int:
        return (ctx[-1] * 31 + 7) % 32000 if ctx else 0

    def propose(self, ctx: List[int]) -> Optional[Proposal]:
        rows = self.ring.grab(self.k)  # clean: handed to the caller in the proposal
        if rows is None:
            return None
        toks: List[int] = []
        for _ in range(self.k):
            toks.append(self._draft_token(ctx + toks))
        return Proposal(toks, rows)

    def propose_ngram(self, ctx: List[int]) -> Optional[Proposal]:
        rows = self.ring.grab(self.k)  # leak: no matching n-gram returns None and keeps the rows
        if rows is None:
            return None
        tail = self.ngrams.get(tuple(ctx[-2:]))
        if not tail:
            return None
        return Proposal(tail[:self.k], rows)

    def propose_lookup(self, ctx: List[int]) -> Optional[Proposal]:
        tail = self.ngrams.get(tuple(ctx[-3:]))
        if not tail:
            return None
        rows = self.ring.grab(min(len(tail), self.k))  # clean: near miss, taken after the early return
        return Proposal(tail[:self.k], rows) if rows is not None else None

    def draft_hidden(self, ctx: List[int]) -> torch.Tensor:
        """The hidden states of the last tokens, in a pooled buffer."""
        buf = self.hidden.lend()  # clean: handed to the caller
        n = min(len(ctx), buf.shape[0])
        for i, tok in enumerate(ctx[-n:] if n else []):
            buf[i].fill_(float(tok))
        return buf

    def last_hidden(self, ctx: List[int]) -> torch.Tensor:
        states = self.draft_hidden(ctx)  # leak: only a copy of one row leaves, the buffer does not go back
        row = min(len(ctx), states.shape[0]) - 1
        return states[row].clone()


class Verifier:
    def __init__(self, drafter: Drafter, ring: SlotRing) -> None:
        self.drafter = drafter
        self.ring = ring
        self.accepted = 0
        self.proposed = 0

    def _accept(self, ctx: List[int], toks: List[int]) -> int:
        n = 0
        for t in toks:
            if (t + len(ctx)) % 5 == 0:
                break
            n += 1
        return n

    def step(self, ctx: List[int]) -> List[int]:
        p = self.drafter.propose(ctx)  # leak: the rows are not dropped when no token is accepted
        if p is None:
            return []
        self.proposed += len(p.tokens)
        n = self._accept(ctx, p.tokens)
        if n == 0:
            return []
        self.accepted += n
        self.ring.drop(p.rows)
        return p.tokens[:n]

    def step_lookup(self, ctx: List[int]) -> List[int]:
        p = self.drafter.propose_lookup(ctx)  # clean: dropped whatever was accepted
        out: List[int] = []
        if p is not None:
            n = self._accept(ctx, p.tokens)
            out = p.tokens[:n]
            self.ring.drop(p.rows)
        return out

    def step_batch(self, batch: Dict[int, List[int]]) -> Dict[int, List[int]]:
        props: Dict[int, Proposal] = {}
        for rid, ctx in batch.items():
            p = self.drafter.propose(ctx)  # clean: near miss, collected in props, dropped in the second loop
            if p is None:
                log.debug("no rows for %d", rid)
                continue
            props[rid] = p
        out: Dict[int, List[int]] = {}
        for rid, p in props.items():
            n = self._accept(batch[rid], p.tokens)
            out[rid] = p.tokens[:n]
            self.ring.drop(p.rows)
        return out

    def stream(self, ctx: List[int], eos: int) -> Iterator[int]:
        """Draft and verify until end of sequence."""
        rows = self.ring.grab(self.drafter.k)  # leak: reaching eos returns before the drop
        if rows is None:
            return
        produced = 0
        while produced < 1024:
            tok = self.drafter._draft_token(ctx)
            ctx.append(tok)
            yield tok
            if tok == eos:
                return
            produced += 1
        self.ring.drop(rows)

    def stream_safe(self, ctx: List[int], eos: int) -> Iterator[int]:
        rows = self.ring.grab(self.drafter.k)  # clean: dropped in finally, also when the consumer stops
        if rows is None:
            return
        try:
            for _ in range(1024):
                tok = self.drafter._draft_token(ctx)
                ctx.append(tok)
                yield tok
                if tok == eos:
                    return
        finally:
            self.ring.drop(rows)


class DraftTree:
    """Token tree of candidates; each node owns one row."""

    def __init__(self, ring: SlotRing, root_token: int) -> None:
        self.ring = ring
        self.root = TreeNode(root_token, [], 0.0)

    def attach(self, parent: TreeNode, token: int, score: float) -> Optional[TreeNode]:
        rows = self.ring.grab(1)  # leak: keep_best replaces the children without dropping the losers' rows
        if rows is None:
            return None
        node = TreeNode(token, rows, score)
        parent.children.append(node)
        return node

    def keep_best(self, node: TreeNode) -> None:
        while node.children:
            best = max(node.children, key=lambda c: c.score)
            node.children = [best]
            node = best

    def prune(self, node: TreeNode) -> None:
        for child in node.children:
            self.prune(child)
        node.children = []
        self.ring.drop(node.rows)
        node.rows = []

    def close(self) -> None:
        self.prune(self.root)


class ChainDraft:
    """A tree of width one."""

    def __init__(self, ring: SlotRing) -> None:
        self.ring = ring
        self.links: List[Tuple[int, List[int]]] = []

    def extend(self, token: int) -> bool:
        rows = self.ring.grab(1)  # clean: near miss, in links, dropped by cut_after which close calls
        if rows is None:
            return False
        self.links.append((token, rows))
        return True

    def cut_after(self, n: int) -> None:
        while len(self.links) > n:
            _, rows = self.links.pop()
            self.ring.drop(rows)

    def close(self) -> None:
        self.cut_after(0)
