"""Batch lanes of a vectorised simulator: a boolean numpy array says which lanes are taken."""
from __future__ import annotations

import numpy as np


class Lanes:
    def __init__(self, width: int, state: int) -> None:
        self.taken = np.zeros(width, dtype=bool)
        self.state = np.zeros((width, state), dtype=np.float32)

    def seize(self, want: int) -> np.ndarray:
        """Indices of as many free lanes as there are, at most `want`."""
        idx = np.flatnonzero(~self.taken)[:want]
        self.taken[idx] = True
        return idx

    def seize_all_or_none(self, want: int) -> np.ndarray | None:
        idx = np.flatnonzero(~self.taken)
        if idx.size < want:
            return None
        idx = idx[:want]
        self.taken[idx] = True
        return idx

    def vacate(self, idx: np.ndarray) -> None:
        self.taken[idx] = False
        self.state[idx] = 0.0


class Simulator:
    def __init__(self, lanes: Lanes, physics) -> None:
        self.lanes = lanes
        self.physics = physics
        self.episodes: dict[str, np.ndarray] = {}

    def rollout(self, starts: np.ndarray, steps: int) -> np.ndarray | None:
        idx = self.lanes.seize_all_or_none(len(starts))  # clean: vacated after the steps
        if idx is None:
            return None
        self.lanes.state[idx] = starts
        for _ in range(steps):
            self.lanes.state[idx] = self.physics(self.lanes.state[idx])
        final = self.lanes.state[idx].copy()
        self.lanes.vacate(idx)
        return final

    def rollout_partial(self, starts: np.ndarray, steps: int) -> np.ndarray | None:
        idx = self.lanes.seize(len(starts))  # leak: fewer lanes than starts are not vacated
        if idx.size < len(starts):
            return None
        self.lanes.state[idx] = starts
        for _ in range(steps):
            self.lanes.state[idx] = self.physics(self.lanes.state[idx])
        final = self.lanes.state[idx].copy()
        self.lanes.vacate(idx)
        return final

    def rollout_some(self, starts: np.ndarray, steps: int) -> np.ndarray | None:
        idx = self.lanes.seize(len(starts))  # clean: near miss, returns early only with no lane at all
        if idx.size == 0:
            return None
        self.lanes.state[idx] = starts[:idx.size]
        for _ in range(steps):
            self.lanes.state[idx] = self.physics(self.lanes.state[idx])
        final = self.lanes.state[idx].copy()
        self.lanes.vacate(idx)
        return final

    def search(self, start: np.ndarray, width: int, rounds: int) -> np.ndarray | None:
        beam = self.lanes.seize_all_or_none(width)  # leak: the half cut off is never vacated
        if beam is None:
            return None
        self.lanes.state[beam] = start
        for _ in range(rounds):
            self.lanes.state[beam] = self.physics(self.lanes.state[beam])
            order = np.argsort(self.lanes.state[beam][:, 0])
            beam = beam[order[:max(1, beam.size // 2)]]
        best = self.lanes.state[beam[0]].copy()
        self.lanes.vacate(beam)
        return best

    def tournament(self, start: np.ndarray, width: int, rounds: int) -> np.ndarray | None:
        beam = self.lanes.seize_all_or_none(width)  # clean: near miss, losers, then the rest
        if beam is None:
            return None
        self.lanes.state[beam] = start
        for _ in range(rounds):
            self.lanes.state[beam] = self.physics(self.lanes.state[beam])
            order = np.argsort(self.lanes.state[beam][:, 0])
            keep = max(1, beam.size // 2)
            self.lanes.vacate(beam[order[keep:]])
            beam = beam[order[:keep]]
        best = self.lanes.state[beam[0]].copy()
        self.lanes.vacate(beam)
        return best

    def open_episode(self, name: str, count: int) -> bool:
        idx = self.lanes.seize_all_or_none(count)  # clean: near miss, kept in episodes, vacated on close
        if idx is None:
            return False
        before = self.episodes.pop(name, None)
        if before is not None:
            self.lanes.vacate(before)
        self.episodes[name] = idx
        return True

    def close_episode(self, name: str) -> None:
        idx = self.episodes.pop(name, None)
        if idx is not None:
            self.lanes.vacate(idx)

    def widen_episode(self, name: str, extra: int) -> bool:
        more = self.lanes.seize_all_or_none(extra)  # leak: an unknown episode returns with the lanes taken
        if more is None:
            return False
        mine = self.episodes.get(name)
        if mine is None:
            return False
        self.episodes[name] = np.concatenate([mine, more])
        return True

    def stress(self) -> float:
        idx = self.lanes.seize(self.lanes.taken.size)  # clean: vacated after the measurement
        value = float(np.abs(self.physics(self.lanes.state[idx])).sum())
        self.lanes.vacate(idx)
        return value
