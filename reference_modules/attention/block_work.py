"""Attention over chosen key blocks: gathered, scored, softmaxed exactly over the chosen set, scattered back.

A pair counts if its blocks are chosen and a dilated branch allows it, with the weight of the number of such
branches. Shapes: Q query blocks, P places (key blocks) for each, T tokens of a block, S = P·T gathered
keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference_modules.attention.blend import Blend
from reference_modules.attention.halving import in_halves_if_needed
from reference_modules.attention.joint import Grads, Inputs, Plan, Softmax
from reference_modules.attention.pairwise import Held
from reference_modules.attention.patterns import BlockPattern, PatternCache, Rows, as_places, static_rows
from reference_modules.attention.plain import accumulation_dtype, drawn, finite_lse
from reference_modules.attention.seeds import derived
from reference_modules.attention.workspace import Pool, temporary

_SCORES_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What each rank does with the keys of one rank; `content`: (b, h, own query blocks, chosen) numbers."""

    plan: Plan
    pattern: BlockPattern
    tokens: int  # of the whole sequence; what lies beyond is padding
    cache: PatternCache | None
    content: Tensor | None = None

    def sees(self, queries: Held, keys: Held, like: Tensor) -> bool:
        """Whether any block may be chosen; content may choose any that is not in the future."""
        q, k = self._numbers(queries, like), self._numbers(keys, like)
        if self.pattern.content:
            return not self.plan.causal or int(k.min()) <= int(q.max())
        return bool(self._static(queries, keys, q, k))

    def forward(self, inputs: Inputs, queries: Held, keys: Held, state: Softmax, pool: Pool | None) -> None:
        """Merge what these keys give."""

        def run(part: _Part) -> None:
            with ExitStack() as held:
                scores, v = part.scores(held, pool), part.gathered(inputs.v_BNHD, held, pool)
                largest = scores.amax(-1, keepdim=True)
                total = scores.sub_(finite_lse(largest)).exp_().sum(-1, keepdim=True)
                lse = (total.log() + largest).squeeze(-1)
                if (kept := part.kept(scores)) is not None:
                    scores.mul_(kept)
                out = scores @ v / total.masked_fill_(largest == -math.inf, 1.0)
                Blend(part.of_queries(state.out_BNHD), part.of_rows(state.lse_BNH), out, lse).apply()

        for part in self._parts(inputs, queries, keys):
            in_halves_if_needed(part, run, allowed=not self.plan.dropout)

    def backward(
        self,
        dout_BNHD: Tensor,
        inputs: Inputs,
        queries: Held,
        keys: Held,
        state: Softmax,
        grads: Grads,
        pool: Pool | None,
    ) -> None:
        """Add these keys' share of dq and these queries' share of dk and dv."""
        scale = self.plan.scale

        def run(part: _Part) -> None:
            with ExitStack() as held:
                p, v = part.scores(held, pool), part.gathered(inputs.v_BNHD, held, pool)
                k = part.gathered(inputs.k_BNHD, held, pool)
                ds = held.enter_context(temporary(pool, p.shape, p.dtype, p.device))
                q, dout, out = (
                    part.of_queries(x).to(p.dtype) for x in (inputs.q_BNHD, dout_BNHD, state.out_BNHD)
                )
                lse = finite_lse(part.of_rows(state.lse_BNH)).unsqueeze(-1)
                rounded = lse.to(p.dtype)
                p.sub_(rounded).exp_().mul_((rounded.to(lse.dtype) - lse).exp_().to(p.dtype))
                torch.matmul(dout, v.mT, out=ds)
                dropped = p
                if (kept := part.kept(p)) is not None:
                    ds.mul_(kept)
                    dropped = p * kept
                dv = dropped.mT @ dout
                ds.sub_((dout * out).sum(-1, keepdim=True)).mul_(p)
                dq, dk = ds @ k * scale, ds.mT @ q * scale
                part.scatter(
                    dv, grads.dv_BNHD
                )  # from here on only sums: a failure before has changed nothing
                part.of_queries(grads.dq_BNHD).add_(dq)
                part.scatter(dk, grads.dk_BNHD)

        for part in self._parts(inputs, queries, keys):
            in_halves_if_needed(part, run, allowed=not self.plan.dropout)

    def _numbers(self, held: Held, like: Tensor) -> Tensor:
        size = self.pattern.block_size
        parts = [torch.arange(c.start // size, c.stop // size, device=like.device) for c in held]
        return torch.cat(parts)

    def _static(self, queries: Held, keys: Held, q: Tensor, k: Tensor) -> tuple[Rows, ...]:
        def compute() -> tuple[Rows, ...]:
            return static_rows(self.pattern, q, k, self.plan.causal)

        if self.cache is None:
            return compute()
        key = (self.pattern, self.plan.causal, tuple(queries), tuple(keys), q.device)
        return self.cache.get(key, compute)

    def _parts(self, inputs: Inputs, queries: Held, keys: Held) -> Iterator[_Part]:
        q, k = self._numbers(queries, inputs.q_BNHD), self._numbers(keys, inputs.q_BNHD)
        if self.content is None:
            rows = self._static(queries, keys, q, k)
        else:
            rows = self._with_content(q, k)
        for group in rows:
            yield from _Part(self, inputs, q, k, group).slabs()

    def _with_content(self, q: Tensor, k: Tensor) -> tuple[Rows, ...]:
        assert self.content is not None
        found = []
        for first in range(0, len(q), 64):
            rows = slice(first, min(first + 64, len(q)))
            static = self.pattern.allowed(q[rows], k, self.plan.causal)
            chosen = (self.content[:, :, rows].unsqueeze(-1) == k).any(-2)
            places = as_places(static | chosen)
            if places.shape[-1]:
                found.append(Rows(rows, places))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some query blocks with their chosen key blocks."""

    work: BlockWork
    inputs: Inputs
    q_blocks: Tensor
    k_blocks: Tensor
    rows: Rows

    def slabs(self) -> Iterator[_Part]:
        """Few enough query blocks at a time that their scores stay under a fixed size."""
        b, _, h, _ = self.inputs.q_BNHD.shape
        places, size = self.rows.places, self.work.pattern.block_size
        together = max(1, _SCORES_AT_ONCE // (b * h * size * size * places.shape[-1]))
        for first in range(0, places.shape[2], together):
            yield self._of_blocks(first, first + together)

    def halves(self) -> list[_Part]:
        """Its first query blocks and its last, none where there is only one."""
        count = self.rows.places.shape[2]
        return [self._of_blocks(0, count // 2), self._of_blocks(count // 2, count)] if count > 1 else []

    def described(self) -> str:
        """For messages."""
        _, _, blocks, chosen = self.rows.places.shape
        return f"{blocks} query blocks with {chosen} key blocks each"

    def _of_blocks(self, first: int, stop: int) -> _Part:
        some = self.rows.places[:, :, first:stop]
        start = self.rows.blocks.start + first
        return replace(self, rows=Rows(slice(start, start + some.shape[2]), some))

    def kept(self, p: Tensor) -> Tensor | None:
        """What dropout leaves of probabilities, as factors; the same in both passes."""
        places = self.rows.blocks.start, int(self.k_blocks[0])
        seed = derived(self.inputs.seed, *places)
        return drawn(p, self.work.plan.dropout, seed)

    def of_queries(self, x_BNHX: Tensor) -> Tensor:
        """(b, h, Q, T, x) of this part's query blocks."""
        size = self.work.pattern.block_size
        rows = slice(self.rows.blocks.start * size, self.rows.blocks.stop * size)
        return _blocks(x_BNHX[:, rows], size)

    def of_rows(self, x_BNH: Tensor) -> Tensor:
        """The same of a tensor without a last axis."""
        return self.of_queries(x_BNH.unsqueeze(-1)).squeeze(-1)

    def gathered(self, x_BNHD: Tensor, held: ExitStack, pool: Pool | None) -> Tensor:
        """(b, h, Q, S, d): the chosen key blocks in a row; absent ones repeat block 0 and are masked."""
        b, _, h, d = x_BNHD.shape
        size, places = self.work.pattern.block_size, self.rows.places
        blocks = _blocks(x_BNHD, size)
        shape = (b, h, places.shape[2], places.shape[3] * size, d)
        work = accumulation_dtype(x_BNHD.dtype)
        buffer = held.enter_context(temporary(pool, shape, work, x_BNHD.device))
        buffer.view(*shape[:3], -1, size, d).copy_(blocks[self._index(b, h)])
        return buffer

    def scatter(self, x_BHQSD: Tensor, onto_BNHD: Tensor) -> None:
        """Add each gathered key's gradient to where the key came from."""
        b, _, h, d = onto_BNHD.shape
        size = self.work.pattern.block_size
        blocks = _blocks(onto_BNHD, size)
        values = x_BHQSD.view(*x_BHQSD.shape[:3], -1, size, d)  # absent keys have p = 0, so they add nothing
        blocks.index_put_(self._index(b, h), values, accumulate=True)

    def scores(self, held: ExitStack, pool: Pool | None) -> Tensor:
        """(b, h, Q, T, S): scale·q·k + log m, −inf where m = 0."""
        k = self.gathered(self.inputs.k_BNHD, held, pool)
        q = self.of_queries(self.inputs.q_BNHD).to(k.dtype)
        scores = held.enter_context(temporary(pool, (*q.shape[:4], k.shape[3]), k.dtype, k.device))
        torch.matmul(q, k.mT, out=scores).mul_(self.work.plan.scale)
        return scores.add_(self._multiplicity().to(scores.dtype).log_())

    def _multiplicity(self) -> Tensor:
        """(b or 1, h, Q, T, S): how many branches allow the pair."""
        size, places = self.work.pattern.block_size, self.rows.places
        token = torch.arange(size, device=places.device)
        t = (self.q_blocks[self.rows.blocks].unsqueeze(1) * size + token)[None, None, :, :, None]
        key_block = self.k_blocks[places.clamp_min(0)].unsqueeze(-1)
        s = (key_block * size + token).flatten(3).unsqueeze(3)
        present = (places >= 0).unsqueeze(-1).expand(*places.shape, size).flatten(3).unsqueeze(3)
        possible = present & (s < self.work.tokens)
        if self.work.plan.causal:
            possible = possible & (s <= t)
        if self.inputs.visible_BNH1 is not None:
            seen = _blocks(self.inputs.visible_BNH1, size)[self._index(*self.inputs.q_BNHD.shape[0:3:2])]
            possible = possible & seen.flatten(3).unsqueeze(3)
        total = torch.zeros((), dtype=torch.int8, device=places.device)
        for branch in self.work.plan.branches:
            w, r = branch.segment, branch.dilation
            o = torch.empty(branch.heads, dtype=torch.int64, device=places.device)
            for offset in range(min(r, branch.heads)):
                heads = branch.heads_at(offset)
                o[heads.start : heads.stop : heads.step] = offset
            o = o.view(1, -1, 1, 1, 1)
            total = total + ((t // w == s // w) & (t % w % r == o) & (s % w % r == o) & possible)
        return total

    def _index(self, b: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
        places, device = self.rows.places.clamp_min(0), self.rows.places.device
        return (
            torch.arange(b, device=device).view(-1, 1, 1, 1),
            torch.arange(h, device=device).view(1, -1, 1, 1),
            places,
        )


def _blocks(x_BNHX: Tensor, size: int) -> Tensor:
    """(b, h, blocks, tokens of a block, x), a view."""
    blocks: Tensor = x_BNHX.unflatten(1, (-1, size))  # type: ignore[no-untyped-call]
    return blocks.permute(0, 3, 1, 2, 4)
