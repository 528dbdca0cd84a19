"""Feature assembly for a training step from stored tensors."""
from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, List, Optional

import numpy as np

from .client import StoreClient, TensorRef


class StepInputs:
    def __init__(self):
        self.refs: Dict[str, TensorRef] = {}
        self.extra: List[TensorRef] = []

    def release(self) -> None:
        for ref in self.refs.values():
            ref.drop()
        self.refs.clear()
        while self.extra:
            self.extra.pop().drop()


class FeatureStage:
    def __init__(self, client: StoreClient, workers: int = 2):
        self.client = client
        self._exec = ThreadPoolExecutor(workers)
        self._ahead: Dict[int, "Future[StepInputs]"] = {}
        self._mean: Optional[TensorRef] = None

    # -- assembly --------------------------------------------------------
    def assemble(self, keys: List[str]) -> StepInputs:
        inputs = StepInputs()
        try:
            for key in keys:
                if key in inputs.refs:
                    continue
                inputs.refs[key] = self.client.require(key)  # clean: near miss, one ref per key, release drops it, also when a later key is missing
        except KeyError:
            inputs.release()
            raise
        return inputs

    def assemble_weighted(self, keys: List[str]) -> StepInputs:
        inputs = StepInputs()
        for key in keys:
            inputs.refs[key] = self.client.require(key)  # leak: a key that repeats overwrites its first ref
        return inputs

    # -- ahead of time -----------------------------------------------------
    def start(self, step: int, keys: List[str]) -> None:
        if step not in self._ahead:
            self._ahead[step] = self._exec.submit(self.assemble, keys)

    def run(self, step: int, keys: List[str]) -> float:
        fut = self._ahead.pop(step, None)
        inputs = fut.result() if fut is not None else self.assemble(keys)  # clean: near miss, either source is released in the finally
        try:
            return float(sum(r.array.sum() for r in inputs.refs.values()))
        finally:
            inputs.release()

    def stop(self) -> None:
        for fut in self._ahead.values():
            if not fut.cancel() and fut.exception() is None:
                fut.result().release()
        self._ahead.clear()
        self._exec.shutdown()

    # -- statistics ----------------------------------------------------------
    def norm(self, keys: List[str]) -> float:
        inputs = self.assemble(keys)  # leak: the all-zero return skips the release
        total = float(sum((r.array ** 2).sum() for r in inputs.refs.values()))
        if total == 0.0:
            return 0.0
        inputs.release()
        return total ** 0.5

    def pair_distance(self, left: str, right: str) -> Optional[float]:
        a = self.client.open_ref(left)  # leak: not dropped when only the right one is missing
        b = self.client.open_ref(right)  # clean: near miss, dropped when the left one is missing
        if a is None:
            if b is not None:
                b.drop()
            return None
        if b is None:
            return None
        try:
            return float(np.abs(a.array - b.array).sum())
        finally:
            a.drop()
            b.drop()

    def set_mean(self, key: str) -> None:
        new = self.client.require(key)  # clean: near miss, the older ref is dropped before the field is overwritten
        if self._mean is not None:
            self._mean.drop()
        self._mean = new

    def share_mean(self) -> Optional[TensorRef]:
        if self._mean is None:
            return None
        return self._mean.clone()  # clean: handed to the caller

    def centered(self, x: np.ndarray) -> np.ndarray:
        mean = self.share_mean()  # leak: the clone is used and forgotten
        return x if mean is None else x - mean.array

    def scaled(self, x: np.ndarray) -> np.ndarray:
        mean = self.share_mean()  # clean: near miss, None returns early, the with drops the clone
        if mean is None:
            return x
        with mean as m:
            return x * m.array

    def clear_mean(self) -> None:
        if self._mean is not None:
            self._mean.drop()
            self._mean = None
