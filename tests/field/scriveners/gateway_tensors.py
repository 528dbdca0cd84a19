"""Host side tensors of the model gateway: padding, casting, scoring and responses."""
from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Optional, Sequence

import torch

log = logging.getLogger("gateway.tensors")


class TensorPool:
    """Keeps host tensors by shape and type; a tensor that is checked out must be checked in."""

    def __init__(self, max_idle: int = 64) -> None:
        self._idle: dict[tuple, list[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()
        self._max_idle = max_idle
        self.outstanding = 0

    def checkout(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        key = (tuple(shape), dtype)
        with self._lock:
            bucket = self._idle[key]
            tensor = bucket.pop() if bucket else torch.empty(tuple(shape), dtype=dtype)
            self.outstanding += 1
        return tensor

    def checkin(self, tensor: torch.Tensor) -> None:
        key = (tuple(tensor.shape), tensor.dtype)
        with self._lock:
            self.outstanding -= 1
            bucket = self._idle[key]
            if len(bucket) < self._max_idle:
                bucket.append(tensor)

    def checkout_like(self, other: torch.Tensor) -> torch.Tensor:
        return self.checkout(other.shape, other.dtype)  # clean: handed to the caller


@dataclass
class Reply:
    request_id: str
    logits: Optional[torch.Tensor] = None
    labels: list[int] = field(default_factory=list)
    error: Optional[str] = None


class Preprocessor:
    def __init__(self, pool: TensorPool, mean: float, std: float, pad_id: int = 0) -> None:
        self.pool = pool
        self.mean = mean
        self.std = std
        self.pad_id = pad_id
        self.seen_rows = 0

    def pad_tokens(self, rows: list[list[int]]) -> torch.Tensor:
        """The result belongs to the caller, who checks it in."""
        width = max(len(row) for row in rows)
        out = self.pool.checkout((len(rows), width), torch.int64)  # clean: returned, the caller checks it in
        out.fill_(self.pad_id)
        for i, row in enumerate(rows):
            out[i, : len(row)] = torch.tensor(row)
        self.seen_rows += len(rows)
        return out

    def row_sums(self, rows: list[list[int]]) -> list[int]:
        """Cheap digest used as the key of the response cache."""
        if not rows:
            return []
        return self.pad_tokens(rows).sum(dim=1).tolist()  # leak: padded tensor is read and dropped

    def row_lengths(self, rows: list[list[int]]) -> list[int]:
        if not rows:
            return []
        padded = self.pad_tokens(rows)  # clean: near miss, checked in after it is copied out
        lengths = (padded != self.pad_id).sum(dim=1).tolist()
        self.pool.checkin(padded)
        return lengths

    def normalise(self, image: torch.Tensor) -> torch.Tensor:
        buf = self.pool.checkout_like(image)  # clean: near miss, divided in place and returned
        torch.sub(image, self.mean, out=buf)
        return buf.div_(self.std)

    def as_float(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives back the argument itself when there is nothing to convert."""
        if tensor.dtype == torch.float32:
            return tensor
        buf = self.pool.checkout(tensor.shape, torch.float32)  # clean: returned to the caller
        buf.copy_(tensor)
        return buf

    def brightness(self, image: torch.Tensor) -> float:
        work = self.as_float(image)  # clean: near miss, checked in exactly when it is not the argument
        value = float(work.mean())
        if work is not image:
            self.pool.checkin(work)
        return value

    def contrast(self, image: torch.Tensor) -> float:
        work = self.as_float(image)  # leak: the converted copy of a byte image is never checked in
        low, high = float(work.min()), float(work.max())
        if high == low:
            return 0.0
        return (high - low) / (high + low)

    def smooth(self, image: torch.Tensor, rounds: int) -> torch.Tensor:
        current = self.pool.checkout_like(image)  # clean: near miss, each round checks in the previous one
        current.copy_(image)
        for _ in range(rounds):
            following = self.pool.checkout_like(image)  # clean: becomes current, last one returned
            torch.mul(current, 0.5, out=following)
            following.add_(0.5 * self.mean)
            self.pool.checkin(current)
            current = following
        return current

    def pyramid_energy(self, image: torch.Tensor, levels: int) -> float:
        level = self.pool.checkout_like(image)  # clean: checked in before the first smaller level is bound
        level.copy_(image)
        energy = float(level.pow(2).sum())
        side = image.shape[-1]
        self.pool.checkin(level)
        for _ in range(levels):
            side = side // 2
            if side == 0:
                break
            level = self.pool.checkout((side, side), image.dtype)  # leak: rebound by each level, none checked in
            level.copy_(image[:side, :side])
            energy += float(level.pow(2).sum())
        return energy


class Scorer:
    def __init__(self, pool: TensorPool, pre: Preprocessor, classes: int) -> None:
        self.pool = pool
        self.pre = pre
        self.classes = classes
        self.in_flight: dict[str, Reply] = {}

    def begin(self, request_id: str) -> Reply:
        reply = Reply(request_id)
        reply.logits = self.pool.checkout((self.classes,), torch.float32)  # clean: checked in by end()
        self.in_flight[request_id] = reply
        return reply

    def end(self, request_id: str) -> list[int]:
        reply = self.in_flight.pop(request_id)
        if reply.logits is not None:
            reply.labels = reply.logits.topk(3).indices.tolist()
            self.pool.checkin(reply.logits)
            reply.logits = None
        return reply.labels

    def compare(self, left: torch.Tensor, right: torch.Tensor) -> float:
        a = self.pre.normalise(left)  # clean: checked in on both ways
        if left.shape != right.shape:
            self.pool.checkin(a)
            return 0.0
        b = self.pre.normalise(right)  # leak: only the left one is checked in
        similarity = float((a * b).sum())
        self.pool.checkin(a)
        return similarity
