"""Mixture-of-experts token dispatch: per-expert staging tiles from a shared tile pool."""
from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Deque, Iterable, Optional


class CapacityExceeded(Exception):
    pass


class Tile:
    __slots__ = ("idx", "rows", "limit")

    def __init__(self, idx: int, limit: int) -> None:
        self.idx = idx
        self.limit = limit
        self.rows: list[int] = []

    @property
    def full(self) -> bool:
        return len(self.rows) >= self.limit


class TilePool:
    def __init__(self, n: int, rows_per_tile: int) -> None:
        self._tiles = [Tile(i, rows_per_tile) for i in range(n)]

    def grab(self) -> Tile:
        if not self._tiles:
            raise CapacityExceeded()
        return self._tiles.pop()

    def ungrab(self, tile: Tile) -> None:
        tile.rows.clear()
        self._tiles.append(tile)

    def ungrab_all(self, tiles: Iterable[Tile]) -> None:
        for t in tiles:
            self.ungrab(t)

    def left(self) -> int:
        return len(self._tiles)


@dataclass
class DispatchPlan:
    tiles: dict[int, list[Tile]] = field(default_factory=lambda: defaultdict(list))
    overflow: list[int] = field(default_factory=list)


class Dispatcher:
    def __init__(self, pool: TilePool, num_experts: int) -> None:
        self.pool = pool
        self.num_experts = num_experts
        self.open_tiles: dict[int, Tile] = {}
        self.ready: Deque[tuple[int, Tile]] = deque()
        self.shared: Optional[Tile] = None
        self.plans: list[DispatchPlan] = []

    def route(self, token: int, expert: int) -> None:
        tile = self.open_tiles.get(expert)
        if tile is not None and tile.full:
            self.ready.append((expert, tile))
            tile = None
        if tile is None:
            tile = self.pool.grab()  # clean: near miss, overwrites only an entry that has moved to ready
            self.open_tiles[expert] = tile
        tile.rows.append(token)

    def route_eager(self, token: int, expert: int) -> None:
        tile = self.open_tiles.pop(expert, None)
        if tile is None:
            tile = self.pool.grab()  # clean: put back in open_tiles or queued in ready
        tile.rows.append(token)
        if tile.full:
            self.ready.append((expert, tile))
        else:
            self.open_tiles[expert] = tile

    def flush(self) -> None:
        for expert, tile in self.open_tiles.items():
            self.ready.append((expert, tile))
        self.open_tiles = {}

    def execute(self) -> int:
        n = 0
        while self.ready:
            expert, tile = self.ready.popleft()
            n += len(tile.rows) * (expert + 1)
            self.pool.ungrab(tile)
        return n

    def plan(self, routed: list[tuple[int, int]], capacity: int) -> DispatchPlan:
        plan = DispatchPlan()
        for token, expert in routed:
            tiles = plan.tiles[expert]
            if not tiles or tiles[-1].full:
                if len(tiles) >= capacity:
                    plan.overflow.append(token)
                    continue
                tiles.append(self.pool.grab())  # clean: near miss, the continue stands before it; owned by the plan
            tiles[-1].rows.append(token)
        return plan

    def run_plan(self, routed: list[tuple[int, int]], capacity: int) -> int:
        plan = self.plan(routed, capacity)  # clean: every list of the plan is given back
        total = 0
        for expert, tiles in plan.tiles.items():
            total += sum(len(t.rows) for t in tiles) * (expert + 1)
            self.pool.ungrab_all(tiles)
        return total

    def run_local(self, routed: list[tuple[int, int]], capacity: int, local: range) -> int:
        plan = self.plan(routed, capacity)  # leak: tiles of experts that are not local are skipped by continue
        total = 0
        for expert, tiles in plan.tiles.items():
            if expert not in local:
                continue
            total += sum(len(t.rows) for t in tiles)
            self.pool.ungrab_all(tiles)
        return total

    def dry_run(self, routed: list[tuple[int, int]], capacity: int) -> list[int]:
        """Tokens that would overflow at this capacity."""
        return self.plan(routed, capacity).overflow  # leak: only the overflow list is kept, the plan's tiles are dropped

    def stage(self, routed: list[tuple[int, int]]) -> None:
        self.plans.append(self.plan(routed, 1 << 30))  # clean: kept in plans, unstage gives back

    def unstage(self) -> int:
        n = 0
        while self.plans:
            plan = self.plans.pop()
            for tiles in plan.tiles.values():
                n += len(tiles)
                self.pool.ungrab_all(tiles)
        return n

    def route_capped(self, tokens: list[int], expert: int, cap: int) -> list[int]:
        dropped: list[int] = []
        tile = self.pool.grab()  # leak: rebound to the next tile when full, the full one is never queued
        used = 1
        for t in tokens:
            if tile.full:
                if used == cap:
                    dropped.append(t)
                    continue
                tile = self.pool.grab()  # leak: rebound again by the next full tile
                used += 1
            tile.rows.append(t)
        self.ready.append((expert, tile))
        return dropped

    def begin_shared(self, tokens: list[int]) -> None:
        if self.shared is not None:
            self.pool.ungrab(self.shared)
        self.shared = self.pool.grab()  # clean: near miss, the former one goes back first; end_shared gives this one back
        self.shared.rows.extend(tokens)

    def end_shared(self) -> int:
        if self.shared is None:
            return 0
        n = len(self.shared.rows)
        self.pool.ungrab(self.shared)
        self.shared = None
        return n

    def replicate(self, experts: list[int], tokens: list[int]) -> Optional[list[Tile]]:
        """One tile per replica, all or nothing."""
        out: list[Tile] = []
        try:
            for _ in experts:
                out.append(self.pool.grab())  # clean: near miss, the except gives the partial list back
        except CapacityExceeded:
            self.pool.ungrab_all(out)
            return None
        for t in out:
            t.rows.extend(tokens)
        return out

    def broadcast(self, experts: list[int], tokens: list[int]) -> bool:
        tiles = self.replicate(experts, tokens)  # clean: queued in ready
        if tiles is None:
            return False
        self.ready.extend(zip(experts, tiles))
        return True

    def broadcast_hot(self, experts: list[int], tokens: list[int], hot: set[int]) -> bool:
        tiles = self.replicate(experts, tokens)  # leak: the filter throws the tiles of cold experts away
        if tiles is None:
            return False
        self.ready.extend((e, t) for e, t in zip(experts, tiles) if e in hot)
        return True

    def gather(self, experts: list[int]) -> Optional[dict[int, Tile]]:
        out: dict[int, Tile] = {}
        try:
            for e in experts:
                out[e] = self.pool.grab()  # leak: the except returns None without giving the partial dict back
        except CapacityExceeded:
            return None
        return out

    def gather_rows(self, experts: list[int]) -> dict[int, list[int]]:
        held = self.gather(experts)  # clean: all values given back
        if held is None:
            return {}
        rows = {e: list(t.rows) for e, t in held.items()}
        self.pool.ungrab_all(held.values())
        return rows


class ExpertMigrator:
    def __init__(self, src: Dispatcher, dst: Dispatcher) -> None:
        self.src = src
        self.dst = dst

    def move(self, expert: int) -> bool:
        tile = self.src.open_tiles.pop(expert, None)
        if tile is None:
            return False
        copy = self.dst.pool.grab()  # leak: dropped when the target has an open tile whose rows are merged instead
        copy.rows.extend(tile.rows)
        self.src.pool.ungrab(tile)
        there = self.dst.open_tiles.get(expert)
        if there is not None:
            there.rows.extend(copy.rows)
            return True
        self.dst.open_tiles[expert] = copy
        return True
