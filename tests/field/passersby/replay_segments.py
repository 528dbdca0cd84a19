"""Trajectory replay for RL fine-tuning. Segments are recycled between actors and the learner."""
import queue
import threading
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch


@dataclass
class Segment:
    sid: int
    obs: np.ndarray
    rewards: np.ndarray
    length: int = 0
    version: int = -1

    def append(self, o: np.ndarray, r: float) -> bool:
        if self.length == len(self.rewards):
            return False
        self.obs[self.length] = o
        self.rewards[self.length] = r
        self.length += 1
        return True


class SegmentStore:
    def __init__(self, count: int, horizon: int, obs_dim: int) -> None:
        self._segments = [
            Segment(i, np.zeros((horizon, obs_dim), np.float32), np.zeros(horizon, np.float32)) for i in range(count)
        ]
        self._lock = threading.Lock()
        self._idle: List[int] = list(range(count))

    def obtain(self) -> Optional[Segment]:
        with self._lock:  # clean: with statement
            if not self._idle:
                return None
            seg = self._segments[self._idle.pop()]  # clean: handed to the caller
        seg.length = 0
        return seg

    def recycle(self, seg: Segment) -> None:
        with self._lock:  # clean: with statement
            self._idle.append(seg.sid)


class Actor:
    def __init__(self, store: SegmentStore, out: "queue.Queue[Segment]", policy: Callable[[np.ndarray], float]) -> None:
        self.store = store
        self.out = out
        self.policy = policy
        self.current: Optional[Segment] = None
        self.version = 0

    def step(self, obs: np.ndarray) -> float:
        r = self.policy(obs)
        if self.current is None:
            self.current = self.store.obtain()  # clean: near miss, full segments go to the queue and the field is emptied, close() recycles
            if self.current is None:
                return r
        if not self.current.append(obs, r):
            self.current.version = self.version
            self.out.put(self.current)
            self.current = None
        return r

    def restart(self) -> None:
        """New episode: begin with an empty segment."""
        self.current = self.store.obtain()  # leak: a half filled segment in the field is lost

    def rollout(self, env_obs: List[np.ndarray], min_len: int) -> bool:
        seg = self.store.obtain()  # leak: too short rollouts are thrown away with their segment
        if seg is None:
            return False
        for o in env_obs:
            if not seg.append(o, self.policy(o)):
                break
        if seg.length < min_len:
            return False
        seg.version = self.version
        self.out.put(seg)
        return True

    def rollout_checked(self, env_obs: List[np.ndarray], min_len: int) -> bool:
        seg = self.store.obtain()  # clean: near miss, too short ones are recycled, the others go to the queue
        if seg is None:
            return False
        for o in env_obs:
            if not seg.append(o, self.policy(o)):
                break
        if seg.length < min_len:
            self.store.recycle(seg)
            return False
        self.out.put(seg)
        return True

    def close(self) -> None:
        if self.current is not None:
            self.store.recycle(self.current)
            self.current = None


class Learner:
    def __init__(self, store: SegmentStore, inbox: "queue.Queue[Segment]", max_lag: int = 4) -> None:
        self.store = store
        self.inbox = inbox
        self.max_lag = max_lag
        self.version = 0
        self.window: List[Segment] = []
        self.stats: Dict[str, float] = {}

    def take_segment(self, timeout: float = 1.0) -> Optional[Segment]:
        """Next segment; whoever takes it recycles it."""
        try:
            return self.inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def train_one(self, update: Callable[[torch.Tensor, torch.Tensor], float]) -> Optional[float]:
        seg = self.take_segment()  # leak: stale segments are ignored and not recycled
        if seg is None:
            return None
        if self.version - seg.version > self.max_lag:
            self.stats["stale"] = self.stats.get("stale", 0) + 1
            return None
        loss = update(torch.from_numpy(seg.obs[: seg.length]), torch.from_numpy(seg.rewards[: seg.length]))
        self.store.recycle(seg)
        self.version += 1
        return loss

    def collect(self, n: int) -> List[Segment]:
        got: List[Segment] = []
        while len(got) < n:
            seg = self.take_segment()  # clean: collected for the caller, a None ends the loop
            if seg is None:
                break
            got.append(seg)
        return got

    def train_batch(self, n: int, update: Callable[[List[torch.Tensor]], float]) -> float:
        segs = self.collect(n)  # clean: all recycled after the update
        loss = update([torch.from_numpy(s.obs[: s.length].copy()) for s in segs])
        for s in segs:
            self.store.recycle(s)
        return loss

    def train_filtered(self, n: int, update: Callable[[List[torch.Tensor]], float]) -> float:
        segs = self.collect(n)  # leak: only the fresh ones are recycled
        fresh = [s for s in segs if self.version - s.version <= self.max_lag]
        loss = update([torch.from_numpy(s.obs[: s.length].copy()) for s in fresh])
        for s in fresh:
            self.store.recycle(s)
        return loss

    def fill_window(self, n: int) -> None:
        self.window.extend(self.collect(n - len(self.window)))  # clean: near miss, slide() and close() recycle what is in the window

    def slide(self, keep: int) -> None:
        while len(self.window) > keep:
            self.store.recycle(self.window.pop(0))

    def close(self) -> None:
        self.slide(0)

    def batches(self, n: int) -> Iterator[Tuple[Any, int]]:
        while True:
            segs = self.collect(n)  # leak: an incomplete last batch is dropped
            if len(segs) < n:
                return
            yield np.stack([s.obs for s in segs]), len(segs)
            for s in segs:
                self.store.recycle(s)
