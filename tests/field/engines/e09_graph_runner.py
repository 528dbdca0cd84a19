"""Captured-graph instances and the static input buffers that they read."""
from __future__ import annotations

import bisect
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

logger = logging.getLogger(__name__)


@dataclass
class GraphInstance:
    batch_size: int
    static_ids: torch.Tensor
    static_out: torch.Tensor
    replay: Callable[[], None]
    tags: dict[str, Any] = field(default_factory=dict)


class GraphPool:
    """Several captured instances for each padded batch size."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sorted(sizes)
        self._shelf: dict[int, list[GraphInstance]] = {s: [] for s in self.sizes}
        self._out: list[GraphInstance] = []

    def add(self, inst: GraphInstance) -> None:
        self._shelf[inst.batch_size].append(inst)

    def padded(self, n: int) -> int | None:
        i = bisect.bisect_left(self.sizes, n)
        return self.sizes[i] if i < len(self.sizes) else None

    def checkout(self, size: int) -> GraphInstance:
        inst = self._shelf[size].pop()  # clean: moved to the out list and returned
        self._out.append(inst)
        return inst

    def checkout_fit(self, n: int) -> GraphInstance | None:
        """The smallest free instance that holds ``n`` rows."""
        for size in self.sizes:
            if size >= n and self._shelf[size]:
                return self.checkout(size)  # clean: handed to the caller
        return None

    def checkin(self, inst: GraphInstance) -> None:
        self._out.remove(inst)
        inst.tags.clear()
        self._shelf[inst.batch_size].append(inst)


class GraphRunner:
    """Runs decode batches through captured graphs, eager when none fits."""

    def __init__(self, pool: GraphPool, eager: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.pool = pool
        self.eager = eager
        self._held: GraphInstance | None = None

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        n = ids.shape[0]
        inst = self.pool.checkout_fit(n)  # clean: near miss, the eager path is the one without an instance
        if inst is None:
            return self.eager(ids)
        inst.static_ids[:n].copy_(ids)
        inst.replay()
        out = inst.static_out[:n].clone()
        self.pool.checkin(inst)
        return out

    def run_checked(self, ids: torch.Tensor) -> torch.Tensor:
        """Replay, then fall back to eager where the graph produced NaNs."""
        n = ids.shape[0]
        inst = self.pool.checkout_fit(n)  # leak: the NaN fallback returns with the instance out
        if inst is None:
            return self.eager(ids)
        inst.static_ids[:n].copy_(ids)
        inst.replay()
        out = inst.static_out[:n].clone()
        if torch.isnan(out).any():
            logger.warning("NaN in graph output for batch %d", n)
            return self.eager(ids)
        self.pool.checkin(inst)
        return out

    def run_until(self, ids: torch.Tensor, stop: Callable[[torch.Tensor], bool], max_steps: int) -> int:
        """Replay until ``stop`` is satisfied; returns the number of steps."""
        inst = self.pool.checkout_fit(ids.shape[0])  # leak: the early return from the loop skips the checkin
        if inst is None:
            return 0
        inst.static_ids[: ids.shape[0]].copy_(ids)
        for step in range(max_steps):
            inst.replay()
            if stop(inst.static_out):
                return step + 1
        self.pool.checkin(inst)
        return max_steps

    def run_many(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        """Replay several batches before reading any of their outputs."""
        launched: list[tuple[GraphInstance, int]] = []
        for ids in batches:
            inst = self.pool.checkout_fit(ids.shape[0])  # clean: near miss, goes into a tuple, the unpacked first part is checked in
            if inst is None:
                break
            inst.static_ids[: ids.shape[0]].copy_(ids)
            inst.replay()
            launched.append((inst, ids.shape[0]))
        outs = []
        for inst, n in launched:
            outs.append(inst.static_out[:n].clone())
            self.pool.checkin(inst)
        outs.extend(self.eager(ids) for ids in batches[len(launched) :])
        return outs

    def run_pair(self, draft_ids: torch.Tensor, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        with ExitStack() as stack:
            draft = self.pool.checkout_fit(draft_ids.shape[0])  # clean: near miss, the stack checks it in on every way out
            if draft is None:
                return None
            stack.callback(self.pool.checkin, draft)
            target = self.pool.checkout_fit(target_ids.shape[0])  # clean: near miss, None or pushed onto the stack
            if target is None:
                return None
            stack.callback(self.pool.checkin, target)
            draft.static_ids[: draft_ids.shape[0]].copy_(draft_ids)
            target.static_ids[: target_ids.shape[0]].copy_(target_ids)
            draft.replay()
            target.replay()
            return draft.static_out.clone(), target.static_out.clone()

    def hold(self, n: int) -> bool:
        """Keep an instance across the steps of a decode burst."""
        inst = self.pool.checkout_fit(n)  # clean: near miss, what was held before is checked in before the store
        if inst is None:
            return False
        if self._held is not None:
            self.pool.checkin(self._held)
        self._held = inst
        return True

    def grow_held(self, n: int) -> None:
        """Change to a larger instance when the burst outgrew the held one."""
        if self._held is None or self._held.batch_size >= n:
            return
        larger = self.pool.checkout_fit(n)  # leak: replaces the held instance, which nobody checks in
        if larger is None:
            return
        larger.tags.update(self._held.tags)
        self._held = larger

    def unhold(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self.pool.checkin(held)


def time_sizes(pool: GraphPool, clock: Callable[[], float]) -> dict[int, float]:
    """Replay one instance of each size and note the time taken."""
    times: dict[int, float] = {}
    for size in pool.sizes:
        try:
            inst = pool.checkout(size)  # clean: near miss, IndexError means that nothing came out
        except IndexError:
            continue
        began = clock()
        inst.replay()
        times[size] = clock() - began
        pool.checkin(inst)
    return times
