from __future__ import annotations

import torch


class TrajectoryStore:
    """Fixed rows of a replay tensor, handed out by a free bitmap."""

    def __init__(self, rows: int, steps: int, width: int):
        self.data = torch.zeros(rows, steps, width)
        self._free = torch.ones(rows, dtype=torch.bool)

    def open_row(self) -> int:
        idx = self._free.nonzero()
        if not len(idx):
            return -1
        row = int(idx[0])
        self._free[row] = False
        return row

    def close_row(self, row: int) -> None:
        self._free[row] = True


class Recorder:
    def __init__(self, store: TrajectoryStore):
        self.store = store
        self.open: dict[str, int] = {}
        self.sealed: list[int] = []

    def begin(self, episode: str) -> bool:
        row = self.store.open_row()  # leak: the row of an episode begun before is overwritten
        if row < 0:
            return False
        self.open[episode] = row
        return True

    def seal(self, episode: str) -> None:
        self.sealed.append(self.open.pop(episode))

    def discard(self, episode: str) -> None:
        row = self.open.pop(episode, None)
        if row is not None:
            self.store.close_row(row)

    def take_batch(self, n: int) -> torch.Tensor | None:
        if len(self.sealed) < n:
            return None
        rows = [self.sealed.pop() for _ in range(n)]  # clean: closed after the copy
        batch = self.store.data[rows].clone()
        for r in rows:
            self.store.close_row(r)
        return batch

    def take_best(self, n: int, reward) -> torch.Tensor:
        rows, self.sealed = self.sealed, []
        rows.sort(key=reward, reverse=True)
        batch = self.store.data[rows[:n]].clone()
        for r in rows:
            self.store.close_row(r)
        return batch

    def synth(self, steps: list[torch.Tensor]) -> int:
        """Row made of given steps, for warm starts. -1 when it does not fit."""
        row = self.store.open_row()  # leak: too long a trajectory returns -1 with the row open
        if row < 0:
            return -1
        if len(steps) > self.store.data.shape[1]:
            return -1
        self.store.data[row, : len(steps)] = torch.stack(steps)
        return row

    def adopt(self, steps: list[torch.Tensor]) -> bool:
        row = self.synth(steps)  # clean: near miss, moved into self.sealed, which the batches empty
        if row < 0:
            return False
        self.sealed.append(row)
        return True
