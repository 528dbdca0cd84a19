from __future__ import annotations

import torch

from .pools import ArenaPool, ClientPool, ShardClient


def pack_tokens(arena: ArenaPool, rows: list[list[int]], width: int) -> torch.Tensor:
    """Padded tokens in a lent buffer. The caller repays it."""
    buf = arena.lend_or_raise(len(rows), width)  # clean: returned to the caller
    buf.zero_()
    for i, r in enumerate(rows):
        r = r[:width]
        buf[i, : len(r)] = torch.tensor(r, dtype=buf.dtype)
    return buf


def pack_tokens_or_none(arena: ArenaPool, rows: list[list[int]], width: int) -> torch.Tensor | None:
    if not rows:
        return None
    buf = arena.lend(len(rows), width)  # clean: near miss, repaid when a row is too long, else the caller's
    if buf is None:
        return None
    buf.zero_()
    for i, r in enumerate(rows):
        if len(r) > width:
            arena.repay(buf)
            return None
        buf[i, : len(r)] = torch.tensor(r, dtype=buf.dtype)
    return buf


def row_lengths(arena: ArenaPool, rows: list[list[int]], width: int) -> list[int]:
    packed = pack_tokens(arena, rows, width)  # leak: used for a count and neither repaid nor returned
    return (packed != 0).sum(1).tolist()


def masked_mean(arena: ArenaPool, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    work = arena.lend_or_raise(hidden.shape[0], hidden.shape[-1])  # clean: the quotient is a new tensor and work is repaid
    torch.sum(hidden * mask.unsqueeze(-1), dim=1, out=work)
    mean = work / mask.sum(1, keepdim=True).clamp_min(1)
    arena.repay(work)
    return mean


def send_all(pool: ClientPool, client: ShardClient, ids: list[int], vecs: torch.Tensor) -> bool:
    """Sends and hangs up, whatever the answer."""
    try:
        return client.add(ids, vecs)
    finally:
        pool.hang_up(client)


def send_if_alive(pool: ClientPool, client: ShardClient, ids: list[int], vecs: torch.Tensor) -> bool:
    if client.dead:
        return False
    ok = client.add(ids, vecs)
    pool.hang_up(client)
    return ok
