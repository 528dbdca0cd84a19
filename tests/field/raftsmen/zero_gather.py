"""Parameter gathering for fully sharded modules.

`GatherPool` keeps a fixed number of full-size buffers.  A unit holds its buffer
while it is in use by forward or backward and for `prefetch` units ahead.
"""
from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional

import torch
import torch.distributed as dist

log = logging.getLogger("zero")


class GatherPool:
    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.empty(count, numel, dtype=dtype, device=device)
        self._vacant = [True] * count

    def occupy(self) -> Optional[int]:
        for i, v in enumerate(self._vacant):
            if v:
                self._vacant[i] = False
                return i
        return None

    def vacate(self, row: int) -> None:
        self._vacant[row] = True


class Unit:
    """One wrapped module: its shard, and the row it is gathered in."""

    def __init__(self, name: str, shard: torch.Tensor, world: int) -> None:
        self.name = name
        self.shard = shard
        self.world = world
        self.row: Optional[int] = None
        self.users = 0
        self.keep_after_forward = False
        self.work: Optional[dist.Work] = None


class Gatherer:
    def __init__(self, pool: GatherPool, units: List[Unit], prefetch: int = 1) -> None:
        self.pool = pool
        self.units = units
        self.prefetch = prefetch
        self._index: Dict[str, int] = {u.name: i for i, u in enumerate(units)}

    def _launch(self, u: Unit) -> bool:
        if u.row is not None:
            return True
        row = self.pool.occupy()  # clean: held by the unit until reshard()
        if row is None:
            return False
        u.row = row
        full = self.pool.rows[row][: u.shard.numel() * u.world]
        u.work = dist.all_gather_into_tensor(full, u.shard, async_op=True)
        return True

    def unshard(self, u: Unit) -> torch.Tensor:
        if not self._launch(u):
            self.reclaim()
            if not self._launch(u):
                raise RuntimeError(f"no row for {u.name}")
        if u.work is not None:
            u.work.wait()
            u.work = None
        u.users += 1
        i = self._index[u.name]
        for nxt in self.units[i + 1 : i + 1 + self.prefetch]:
            self._launch(nxt)
        return self.pool.rows[u.row][: u.shard.numel() * u.world]

    def reshard(self, u: Unit) -> None:
        u.users -= 1
        if u.users == 0 and not u.keep_after_forward and u.row is not None:
            self.pool.vacate(u.row)
            u.row = None

    def reclaim(self) -> None:
        for u in self.units:
            if u.users == 0 and u.row is not None:
                if u.work is not None:
                    u.work.wait()
                    u.work = None
                self.pool.vacate(u.row)
                u.row = None

    # -- hooks ------------------------------------------------------------

    def install(self, module: torch.nn.Module, u: Unit) -> None:
        def before(mod, args):
            flat = self.unshard(u)  # clean: near miss, the forward hook `after` reshards it
            mod.flat_param.data = flat

        def after(mod, args, out):
            mod.flat_param.data = u.shard
            self.reshard(u)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    @contextmanager
    def summoned(self, u: Unit, writeback: bool = False) -> Iterator[torch.Tensor]:
        flat = self.unshard(u)  # leak: a body that raises skips the reshard, which is not in a finally
        yield flat
        if writeback:
            r = dist.get_rank()
            n = u.shard.numel()
            u.shard.copy_(flat[r * n : (r + 1) * n])
        self.reshard(u)

    def norm_of(self, u: Unit) -> float:
        with self.summoned(u) as flat:  # clean: the body ends normally and the context manager reshards
            return float(flat.norm())

    def consolidated(self) -> Dict[str, torch.Tensor]:
        out = {}
        for u in self.units:
            flat = self.unshard(u)  # leak: on ranks other than 0 the loop continues with the unit gathered
            if dist.get_rank() != 0:
                continue
            out[u.name] = flat.cpu()
            self.reshard(u)
        return out

    def tied(self, a: Unit, b: Unit) -> bool:
        fa = self.unshard(a)  # leak: not resharded when b is of another size
        if a.shard.numel() != b.shard.numel():
            return False
        fb = self.unshard(b)  # clean: resharded below
        same = torch.equal(fa, fb)
        self.reshard(b)
        self.reshard(a)
        return same


class ScratchRows:
    """Rows of the same pool for a caller that wants several for a moment."""

    def __init__(self, pool: GatherPool, count: int) -> None:
        self.pool = pool
        self.count = count
        self.rows: List[int] = []

    def __enter__(self) -> Optional[List[torch.Tensor]]:
        for _ in range(self.count):
            row = self.pool.occupy()  # leak: __exit__ returns early when the body raised OutOfMemoryError
            if row is None:
                log.info("%d of %d scratch rows", len(self.rows), self.count)
                break
            self.rows.append(row)
        return [self.pool.rows[r] for r in self.rows]

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None and issubclass(et, torch.cuda.OutOfMemoryError):
            log.warning("scratch use ran out of memory")
            return True
        for r in self.rows:
            self.pool.vacate(r)
        self.rows.clear()
        return False


def drift(gatherer: Gatherer, u: Unit, reference: torch.Tensor) -> float:
    with gatherer.summoned(u) as flat:  # leak: a size mismatch raises inside, which skips the reshard in summoned()
        if flat.numel() != reference.numel():
            raise ValueError(f"{u.name}: {flat.numel()} against {reference.numel()}")
        return float((flat - reference).abs().max())


def ema_update(pool: GatherPool, shards: List[torch.Tensor], ema: List[torch.Tensor], decay: float) -> bool:
    row = pool.occupy()  # clean: None is no row, and otherwise vacated in finally
    try:
        if row is None:
            return False
        for s, e in zip(shards, ema):
            tmp = pool.rows[row][: s.numel()]
            tmp.copy_(s)
            e.mul_(decay).add_(tmp, alpha=1 - decay)
        return True
    finally:
        if row is not None:
            pool.vacate(row)
