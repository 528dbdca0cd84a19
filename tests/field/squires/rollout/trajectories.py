"""Trajectories are written straight into rows of one large array that the learner can read."""
from __future__ import annotations

import numpy as np


class ArenaFull(Exception):
    pass


class TrajectoryTooLong(Exception):
    pass


class RowArena:
    def __init__(self, rows: int, length: int):
        self.tokens = np.zeros((rows, length), np.int32)
        self.rewards = np.zeros(rows, np.float32)
        self.length = length
        self._vacant = list(range(rows))

    def open_row(self) -> int:
        if not self._vacant:
            raise ArenaFull(f"{len(self.rewards)} rows in use")
        row = self._vacant.pop()  # clean: returned to the caller
        self.rewards[row] = 0.0
        return row

    def close_row(self, row: int) -> None:
        self._vacant.append(row)


class Trajectory:
    """Ends with seal(), which gives a copy of the data, or with discard()."""

    def __init__(self, arena: RowArena, version: int):
        self._arena, self.version = arena, version
        self.row = arena.open_row()  # clean: near miss, owned by the trajectory, both ends close it
        self.used = 0

    @property
    def reward(self) -> float:
        return float(self._arena.rewards[self.row])

    def record(self, tokens: list[int], reward: float = 0.0) -> None:
        end = self.used + len(tokens)
        if end > self._arena.length:
            raise TrajectoryTooLong(f"{end} tokens")
        self._arena.tokens[self.row, self.used:end] = tokens
        self._arena.rewards[self.row] += reward
        self.used = end

    def seal(self) -> tuple[np.ndarray, float]:
        data, reward = self._arena.tokens[self.row, :self.used].copy(), self.reward
        self.discard()
        return data, reward

    def discard(self) -> None:
        self._arena.close_row(self.row)
