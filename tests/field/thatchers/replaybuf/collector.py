from __future__ import annotations

import logging
from typing import Any, Iterable

from .sampler import PrioritySampler
from .segments import Segment, SegmentStore

logger = logging.getLogger(__name__)


class Collector:
    """Writes environment steps of several actors into segments."""

    def __init__(self, store: SegmentStore, sampler: PrioritySampler, horizon: int, min_len: int) -> None:
        self.store = store
        self.sampler = sampler
        self.horizon = horizon
        self.min_len = min_len
        self.open: dict[int, Segment] = {}
        self.eval_open: dict[int, Segment] = {}

    def record(self, actor: int, step: dict[str, Any], done: bool) -> bool:
        seg = self.open.get(actor)
        if seg is None:
            seg = self.store.create()  # clean: near miss, sealed into the sampler, dropped when too short or when the actor is lost
            if seg is None:
                return False
            self.open[actor] = seg
        seg.steps.append(step)
        if done or len(seg) >= self.horizon:
            del self.open[actor]
            if len(seg) < self.min_len:
                self.store.drop(seg)
            else:
                self.sampler.insert(seg)
        return True

    def record_eval(self, actor: int, step: dict[str, Any], done: bool) -> float | None:
        seg = self.eval_open.get(actor)
        if seg is None:
            seg = self.store.create()  # leak: lose_actor() pops the evaluation segment without a drop
            if seg is None:
                return None
            self.eval_open[actor] = seg
        seg.steps.append(step)
        if not done:
            return None
        del self.eval_open[actor]
        total = sum(s["reward"] for s in seg.steps)
        self.store.drop(seg)
        return total

    def lose_actor(self, actor: int) -> None:
        seg = self.open.pop(actor, None)
        if seg is not None:
            self.store.drop(seg)
        self.eval_open.pop(actor, None)

    def import_demo(self, episodes: Iterable[list[dict[str, Any]]]) -> int:
        n = 0
        for ep in episodes:
            seg = self.store.create()  # leak: a demonstration without reward is passed over after its row was taken
            if seg is None:
                break
            if not any(s.get("reward") for s in ep):
                logger.info("skipping a demonstration of %d steps", len(ep))
                continue
            seg.steps.extend(ep)
            self.sampler.insert(seg)
            n += 1
        return n

    def import_shards(self, shards: list[list[dict[str, Any]]]) -> bool:
        segs = self.store.create_many(len(shards))  # clean: near miss, dropped when too few, otherwise inserted
        if len(segs) < len(shards):
            for seg in segs:
                self.store.drop(seg)
            return False
        for seg, steps in zip(segs, shards):
            seg.steps.extend(steps)
            self.sampler.insert(seg)
        return True
