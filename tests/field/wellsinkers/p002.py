"""Staging rows in one numpy block, lent by row number."""
import numpy as np


class StagingRows:
    def __init__(self, rows, width):
        self.block = np.zeros((rows, width), dtype=np.float32)
        self._stack = list(range(rows - 1, -1, -1))

    def __len__(self):
        return len(self._stack)

    def take(self):
        if not self._stack:
            return -1
        return self._stack.pop()

    def put(self, row):
        self.block[row].fill(0.0)
        self._stack.append(row)


class Normalizer:
    def __init__(self, staging, out):
        self.staging = staging
        self.out = out
        self.current = -1

    def submit(self, sample):
        row = self.staging.take()  # clean: put back after the copy out
        if row < 0:
            return False
        view = self.staging.block[row]
        view[: len(sample)] = sample
        self.out.append(view / max(float(np.abs(view).max()), 1e-6))
        self.staging.put(row)
        return True

    def submit_all(self, samples):
        done = 0
        for sample in samples:
            row = self.staging.take()  # leak: row kept when the sample is too wide
            if row < 0:
                break
            if len(sample) > self.staging.block.shape[1]:
                continue
            self.staging.block[row, : len(sample)] = sample
            self.out.append(self.staging.block[row].copy())
            self.staging.put(row)
            done += 1
        return done

    def open_window(self):
        self.current = self.staging.take()  # clean: stored, put back by close_window

    def close_window(self):
        if self.current >= 0:
            self.staging.put(self.current)
            self.current = -1


def mean_of(staging, sample):
    row = staging.take()  # leak: not put back when it was taken
    if row < 0:
        return float(np.mean(sample))
    staging.block[row, : len(sample)] = sample
    return float(staging.block[row].mean())
