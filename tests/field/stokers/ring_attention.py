from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
import torch.distributed as dist


class SlotRing:
    """KV staging slots of one context parallel rank, addressed by index."""

    def __init__(self, slots: int, shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.storage = torch.empty((slots, *shape), dtype=dtype, device=device)
        self._open: List[int] = list(range(slots))

    def claim(self) -> Optional[int]:
        if not self._open:
            return None
        return self._open.pop()

    def claim_pair(self) -> Optional[Tuple[int, int]]:
        left = self.claim()  # leak: lost when the second claim of the pair fails
        if left is None:
            return None
        right = self.claim()  # clean: handed on to the caller with the left one
        if right is None:
            return None
        return left, right

    def vacate(self, slot: int) -> None:
        self._open.append(slot)

    def view(self, slot: int) -> torch.Tensor:
        return self.storage[slot]


@dataclass
class Exchange:
    ident: int
    works: List[dist.Work]


class RingComm:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._ids = itertools.count()
        self._pending: Dict[int, Exchange] = {}

    def post(self, send: torch.Tensor, recv: torch.Tensor) -> Exchange:
        ops = [
            dist.P2POp(dist.isend, send, (self.rank + 1) % self.world, self.group),
            dist.P2POp(dist.irecv, recv, (self.rank - 1) % self.world, self.group),
        ]
        ex = Exchange(next(self._ids), dist.batch_isend_irecv(ops))
        self._pending[ex.ident] = ex
        return ex

    def complete(self, ex: Exchange) -> None:
        for work in ex.works:
            work.wait()
        del self._pending[ex.ident]


def merge(out: Optional[torch.Tensor], lse: Optional[torch.Tensor], o: torch.Tensor, l: torch.Tensor):
    if out is None or lse is None:
        return o, l
    new = torch.logaddexp(lse, l)
    return out * (lse - new).exp() + o * (l - new).exp(), new


def block_attention(q: torch.Tensor, kv: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    k, v = kv.unbind(0)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


class RingAttention:
    def __init__(self, ring: SlotRing, comm: RingComm, causal: bool) -> None:
        self.ring = ring
        self.comm = comm
        self.causal = causal
        self.kept: Dict[int, int] = {}

    def forward(self, layer: int, q: torch.Tensor, kv: torch.Tensor, keep: bool) -> Optional[torch.Tensor]:
        pair = self.ring.claim_pair()  # clean: near miss, both slots are vacated or one is kept for backward
        if pair is None:
            return None
        cur, nxt = pair
        self.ring.view(cur).copy_(kv)
        out = lse = None
        last = self.comm.world - 1
        for step in range(self.comm.world):
            ex: Optional[Exchange] = None
            if step != last:
                ex = self.comm.post(self.ring.view(cur), self.ring.view(nxt))  # clean: near miss, completed under the guard that mirrors this one
            o, l = block_attention(q, self.ring.view(cur))
            out, lse = merge(out, lse, o, l)
            if ex is not None:
                self.comm.complete(ex)
                cur, nxt = nxt, cur
        self.ring.vacate(nxt)
        if keep:
            old = self.kept.pop(layer, None)
            if old is not None:
                self.ring.vacate(old)
            self.kept[layer] = cur
        else:
            self.ring.vacate(cur)
        return out

    def forward_causal(self, q: torch.Tensor, kv: torch.Tensor) -> Optional[torch.Tensor]:
        cur = self.ring.claim()  # clean: near miss, rolled back where there is no second slot, vacated at the end
        if cur is None:
            return None
        nxt = self.ring.claim()  # clean: vacated at the end
        if nxt is None:
            self.ring.vacate(cur)
            return None
        self.ring.view(cur).copy_(kv)
        out = lse = None
        for step in range(self.comm.world):
            ex = self.comm.post(self.ring.view(cur), self.ring.view(nxt))  # leak: later ranks' blocks continue and never complete the exchange
            if self.causal and step > self.comm.rank:
                cur, nxt = nxt, cur
                continue
            o, l = block_attention(q, self.ring.view(cur))
            out, lse = merge(out, lse, o, l)
            self.comm.complete(ex)
            cur, nxt = nxt, cur
        self.ring.vacate(cur)
        self.ring.vacate(nxt)
        return out

    def backward(self, layer: int, grad: torch.Tensor) -> Optional[torch.Tensor]:
        saved = self.kept.pop(layer, None)
        if saved is None:
            return None
        spare = self.ring.claim()  # clean: near miss, absent means the saved slot goes back to the table
        if spare is None:
            self.kept[layer] = saved
            return None
        dkv = torch.zeros_like(self.ring.view(saved))
        incoming = torch.empty_like(dkv)
        previous: Optional[Exchange] = None
        for _ in range(self.comm.world):
            if previous is not None:
                self.comm.complete(previous)
                dkv.add_(incoming)
            self.ring.view(spare).copy_(self.ring.view(saved))
            previous = self.comm.post(dkv.clone(), incoming)  # leak: the exchange of the last step is completed by nobody
        self.ring.vacate(spare)
        self.ring.vacate(saved)
        return dkv * grad.sum()

    def reduce_grads(self, parts: List[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(parts[0])
        incoming = torch.empty_like(total)
        previous: Optional[Exchange] = None
        for part in parts:
            if previous is not None:
                self.comm.complete(previous)
                total.add_(incoming)
            previous = self.comm.post(part, incoming)  # clean: near miss, the last one is completed after the loop
        if previous is not None:
            self.comm.complete(previous)
            total.add_(incoming)
        return total

    def gather_tail(self, tail: torch.Tensor, rounds: int) -> List[torch.Tensor]:
        tails = [tail]
        slot = self.ring.claim()  # leak: a single rank group returns without vacating
        if slot is None:
            return tails
        if self.comm.world == 1:
            return tails
        for _ in range(rounds):
            ex = self.comm.post(tails[-1], self.ring.view(slot))  # clean: completed in the same round
            self.comm.complete(ex)
            tails.append(self.ring.view(slot).clone())
        self.ring.vacate(slot)
        return tails

    def reset(self) -> None:
        while self.kept:
            _, slot = self.kept.popitem()
            self.ring.vacate(slot)
