"""Token dispatch of a mixture-of-experts layer, with capacity per expert and a pool of workspaces."""
from __future__ import annotations

import threading
from typing import NamedTuple, Sequence

import torch
import torch.distributed as dist

_lock = threading.Lock()
_workspaces: list[torch.Tensor] = []
_lent: set[int] = set()


def init_workspaces(count: int, tokens: int, hidden: int) -> None:
    for _ in range(count):
        _workspaces.append(torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda"))


def get_workspace() -> torch.Tensor:
    with _lock:
        ws = _workspaces.pop()
        _lent.add(id(ws))
        return ws


def maybe_workspace() -> torch.Tensor | None:
    with _lock:
        if not _workspaces:
            return None
        ws = _workspaces.pop()
        _lent.add(id(ws))
        return ws


def put_workspace(ws: torch.Tensor) -> None:
    with _lock:
        _lent.discard(id(ws))
        _workspaces.append(ws)


class Quota(NamedTuple):
    expert: int
    tokens: int


class CapacityBook:
    """Tokens that an expert may still take in this step. A quota that is not redeemed blocks the expert."""

    def __init__(self, experts: int, capacity: int):
        self.left = [capacity] * experts
        self._mu = threading.Lock()

    def grant(self, expert: int, tokens: int) -> Quota | None:
        with self._mu:
            if self.left[expert] < tokens:
                return None
            self.left[expert] -= tokens
            return Quota(expert, tokens)

    def redeem(self, q: Quota) -> None:
        with self._mu:
            self.left[q.expert] += q.tokens


def permute_tokens(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Tokens sorted by expert, in a workspace that the caller puts back."""
    ws = get_workspace()  # clean: the caller puts it back
    torch.index_select(x, 0, order, out=ws[: order.numel()])
    return ws


def unpermute(ws: torch.Tensor, order: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.index_copy_(0, order, ws[: order.numel()])
    return out


def exchange(send: torch.Tensor, splits: Sequence[int], group) -> torch.Tensor:
    """All-to-all into a fresh workspace; the workspace sent from stays with the caller."""
    recv = get_workspace()  # clean: handed on
    dist.all_to_all_single(recv[: sum(splits)], send[: sum(splits)], list(splits), list(splits), group=group)
    return recv


def moe_forward(x, order, splits, experts, group) -> torch.Tensor:
    local = permute_tokens(x, order)  # clean: put back after the exchange
    remote = exchange(local, splits, group)  # clean: put back after the way home
    put_workspace(local)
    at = 0
    for e, n in zip(experts, splits):
        remote[at : at + n].copy_(e(remote[at : at + n]))
        at += n
    home = exchange(remote, splits, group)  # clean: put back at the end
    put_workspace(remote)
    out = unpermute(home, order, torch.zeros_like(x))
    put_workspace(home)
    return out


def moe_forward_dropless(x, order, splits, experts, group) -> torch.Tensor:
    buf = permute_tokens(x, order)  # leak: the name is taken over by the exchanged workspace
    buf = exchange(buf, splits, group)  # leak: taken over by the one that comes home
    at = 0
    for e, n in zip(experts, splits):
        if n == 0:
            continue
        buf[at : at + n].copy_(e(buf[at : at + n]))
        at += n
    buf = exchange(buf, splits, group)  # clean: this one is put back
    out = unpermute(buf, order, torch.zeros_like(x))
    put_workspace(buf)
    return out


def router_entropy(x, order, gate) -> float:
    logits = gate(permute_tokens(x, order)[: order.numel()])  # leak: a slice is used, the workspace lost
    probs = torch.softmax(logits.float(), dim=-1)
    return float(-(probs * probs.clamp_min(1e-9).log()).sum(-1).mean())


def jitter(x: torch.Tensor, eps: float, training: bool) -> torch.Tensor:
    """Multiplicative noise on the router's input."""
    noise = None
    if training and eps > 0:
        noise = maybe_workspace()  # clean: near miss, whenever it is not None it is put back
    if noise is None:
        return x
    view = noise[: x.shape[0]].uniform_(1 - eps, 1 + eps)
    out = x * view
    put_workspace(noise)
    return out


class Dispatcher:
    """Plans a step: quotas are granted while tokens are routed and redeemed when the step is over."""

    def __init__(self, book: CapacityBook):
        self.book = book
        self.quotas: list[Quota] = []
        self.spill: dict[int, list[Quota]] = {}
        self.history: list[int] = []

    def route(self, counts: Sequence[int]) -> list[int]:
        accepted = []
        for e, n in enumerate(counts):
            q = self.book.grant(e, n)  # clean: listed, end_step redeems all
            if q is None:
                accepted.append(0)
                continue
            self.quotas.append(q)
            accepted.append(n)
        return accepted

    def route_spilled(self, step: int, counts: Sequence[int]) -> int:
        placed = 0
        for e, n in enumerate(counts):
            q = self.book.grant(e, n)  # leak: end_step pops the entry for its statistics, nothing redeems it
            if q is not None:
                self.spill.setdefault(step, []).append(q)
                placed += n
        return placed

    def end_step(self, step: int) -> None:
        for q in self.quotas:
            self.book.redeem(q)
        self.quotas = []
        self.history.append(sum(q.tokens for q in self.spill.pop(step, ())))


def split_between(book: CapacityBook, a: int, b: int, tokens: int) -> tuple[Quota, Quota] | None:
    first = book.grant(a, tokens // 2)  # clean: redeemed where the second is refused
    if first is None:
        return None
    second = book.grant(b, tokens - tokens // 2)  # clean: handed on
    if second is None:
        book.redeem(first)
        return None
    return first, second


def try_rebalance(book: CapacityBook, hot: int, cold: int, tokens: int, gain: float) -> bool:
    """Moves room from the hot to the cold expert for the time of a probe."""
    pair = split_between(book, hot, cold, tokens)  # leak: a gain under one returns with both quotas granted
    if pair is None:
        return False
    if gain < 1.0:
        return False
    for q in pair:
        book.redeem(q)
    return True
