"""Only keys a branch can use travel: a row in r for each head, straight to the ranks that share a segment.

Taking from every head the rows of its offset turns branch (w, r) on n rows into branch (w/r, 1) on n/r
rows.  So a rank squeezes its queries, keys and values, swaps squeezed keys with the ranks that need them,
works on the small problem, and spreads the result back.  It needs r | w and r | the length of every chunk.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference_modules.attention.geometry import Branch, Chunk, Tile, tiles
from reference_modules.attention.joint import Grads, Inputs, Plan, Softmax, lse_dtype
from reference_modules.attention.pairwise import DilatedWork, Held
from reference_modules.attention.plain import accumulation_dtype
from reference_modules.attention.ring_pass import KeyFilter, Ring
from reference_modules.attention.seeds import derived
from reference_modules.attention.workspace import Pool, temporary

_FIRST_TAG = 16  # two for each branch, so that no message of one branch is taken for another's


@dataclass(frozen=True, slots=True)
class Squeezed:
    """A branch on the rows its heads can use, and which ranks take part."""

    ring: Ring
    index: int
    branch: Branch
    work: DilatedWork  # the squeezed problem

    @staticmethod
    def of(ring: Ring, plan: Plan, index: int) -> Squeezed:
        branch = plan.branches[index]
        small = replace(branch, segment=branch.segment // branch.dilation, dilation=1)
        return Squeezed(ring, index, branch, DilatedWork(replace(plan, branches=(small,))))

    def held_by(self, rank: int) -> Held:
        r = self.branch.dilation
        return tuple(Chunk(chunk.start // r, chunk.length // r) for chunk in self.ring.held_by(rank))

    def sources(self, rank: int, like: Tensor) -> list[int]:
        """The other ranks whose keys this rank's queries see."""
        others = [other for other in range(self.ring.peers.ranks) if other != rank]
        return [s for s in others if self.work.sees(self.held_by(rank), self.held_by(s), like)]

    def takers(self, like: Tensor) -> list[int]:
        """The ranks that see this rank's keys."""
        mine = self.ring.peers.rank
        return [rank for rank in range(self.ring.peers.ranks) if mine in self.sources(rank, like)]

    @property
    def rows(self) -> Tile:
        """One row of every head in each stretch of r local rows."""
        r, whole = self.branch.dilation, Chunk(0, self.ring.tokens)
        (tile,) = tiles(replace(self.branch, segment=r), whole, whole, False)
        return tile

    def squeeze(self, x_BNHX: Tensor, into_BNHX: Tensor) -> Tensor:
        """(b, n/r, h, x), the heads in the order of `rows`."""
        views = [view.squeeze(3) for view in self.rows.query_views(x_BNHX)]
        return torch.cat(views, 2, out=into_BNHX)

    def spread(self, small_BNHX: Tensor, onto_BNHX: Tensor) -> None:
        """Add the rows of `squeeze` to where they came from."""
        views = self.rows.query_views(onto_BNHX)
        sizes = [view.shape[2] for view in views]
        for view, part in zip(views, torch.split(small_BNHX, sizes, 2), strict=True):
            view.squeeze(3).add_(part)

    def keys(self, inputs: Inputs, pool: Pool | None, held: ExitStack) -> Tensor:
        """This rank's squeezed keys and values in one buffer."""
        buffer = _pair(self, inputs.k_BNHD, inputs.k_BNHD.dtype, pool, held)
        self.squeeze(inputs.k_BNHD, buffer[0])
        self.squeeze(inputs.v_BNHD, buffer[1])
        return buffer

    def tag(self, back: bool) -> int:
        return _FIRST_TAG + 2 * self.index + back


class Gathering:
    """The squeezed keys of all ranks that matter: on their way from `__init__` on, there after `wait`."""

    def __init__(
        self, branch: Squeezed, inputs: Inputs, without: KeyFilter, pool: Pool | None, held: ExitStack
    ) -> None:
        peers, like = branch.ring.peers, inputs.q_BNHD
        self.branch, self.inputs, self.without, self.pool, self.held = branch, inputs, without, pool, held
        own = branch.keys(inputs, pool, held)
        sources, self.takers = branch.sources(peers.rank, like), branch.takers(like)
        theirs = {s: _pair(branch, like, like.dtype, pool, held) for s in sources}
        what = f"keys of branch {branch.index}"
        sends = dict.fromkeys(self.takers, own)
        self._pending = peers.swap(sends, theirs, what, branch.tag(back=False))
        self._keys = {peers.rank: own, **theirs}

    def forward(self, state: Softmax) -> None:
        """Merge what the gathered keys give into `state`."""
        branch, pool = self.branch, self.pool
        self._pending.wait()
        q = self._squeezed(self.inputs.q_BNHD)
        out = self.held.enter_context(temporary(pool, q.shape, state.out_BNHD.dtype, q.device, zero=True))
        lse = torch.full(q.shape[:3], -torch.inf, dtype=lse_dtype(q.dtype), device=q.device)
        small, mine = Softmax(out, lse), branch.held_by(branch.ring.peers.rank)
        for rank in self._keys:
            branch.work.forward(self._at_hand(q, rank), mine, branch.held_by(rank), small, pool)
        state.merge(branch.rows, out.unsqueeze(3), lse.unsqueeze(3))  # a tile of one row a head and stretch

    def backward(self, dout_BNHD: Tensor, state: Softmax, grads: Grads) -> None:
        """Add to dq; send each source its share of dk and dv, a bucket a rank, as soon as it is summed.

        In round j every rank serves the one j before it and hears from the one j after it: sends and
        receives pair up, whatever order a backend runs them in.
        """
        branch, pool, peers = self.branch, self.pool, self.branch.ring.peers
        self._pending.wait()
        like, work = self.inputs.q_BNHD, accumulation_dtype(self.inputs.q_BNHD.dtype)
        q, dout, out = (self._squeezed(x) for x in (like, dout_BNHD, state.out_BNHD))
        lse = self._squeezed(state.lse_BNH.unsqueeze(-1)).squeeze(-1)
        dq = self.held.enter_context(temporary(pool, q.shape, work, q.device, zero=True))
        buckets = {rank: _pair(branch, like, work, pool, self.held) for rank in self._keys}
        arriving = {taker: _pair(branch, like, work, pool, self.held) for taker in self.takers}
        on_their_way = []
        for j in [*range(1, peers.ranks), 0]:
            source, taker = (peers.rank - j) % peers.ranks, (peers.rank + j) % peers.ranks
            if source in self._keys:
                bucket = buckets[source].zero_()
                ours, theirs = branch.held_by(peers.rank), branch.held_by(source)
                total = Grads(dq, bucket[0], bucket[1])
                small = Softmax(out, lse)
                branch.work.backward(dout, self._at_hand(q, source), ours, theirs, small, total, pool)
            sends = {source: buckets[source]} if j and source in buckets else {}
            receives = {taker: arriving[taker]} if j and taker in arriving else {}
            what = f"gradients of branch {branch.index}"
            on_their_way.append(peers.swap(sends, receives, what, branch.tag(back=True)))
        for pending in on_their_way:
            pending.wait()
        own = buckets[peers.rank]
        for taker in self.takers:
            own += arriving[taker]
        branch.spread(dq, grads.dq_BNHD)
        branch.spread(own[0], grads.dk_BNHD)
        branch.spread(own[1], grads.dv_BNHD)

    def _at_hand(self, q_BNHD: Tensor, source: int) -> Inputs:
        """Squeezed queries with the squeezed keys of rank `source`, and its mask squeezed alike."""
        k, v = self._keys[source]
        whole = self.without.inputs(self.inputs.q_BNHD, self.inputs.k_BNHD, self.inputs.v_BNHD, source)
        visible = None if whole.visible_BNH1 is None else self._squeezed(whole.visible_BNH1)
        return Inputs(q_BNHD, k, v, visible, seed=derived(whole.seed, self.branch.index))

    def _squeezed(self, x_BNHX: Tensor) -> Tensor:
        b, n, h, x = x_BNHX.shape
        shape = (b, n // self.branch.branch.dilation, h, x)
        buffer = self.held.enter_context(temporary(self.pool, shape, x_BNHX.dtype, x_BNHX.device))
        return self.branch.squeeze(x_BNHX, buffer)


def _pair(branch: Squeezed, like: Tensor, dtype: torch.dtype, pool: Pool | None, held: ExitStack) -> Tensor:
    b, n, h, d = like.shape
    shape = (2, b, n // branch.branch.dilation, h, d)
    return held.enter_context(temporary(pool, shape, dtype, like.device))
