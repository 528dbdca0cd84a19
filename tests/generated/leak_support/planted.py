# poolaudit leaktests, sha256 e00edf4a4ded1587: written again as long as that is the digest of the rest
"""The planted twin: the same module with one leak put into it. A test that it passes could not have
failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .scenarios import tensors_in

KEPT: list[Any] = []
"""What planted modules keep. Global, so that copies of a planted module leak too; emptied by every
`plant`.
"""


class Planted(torch.nn.Module):
    """A module or function that works as it did, and keeps something of every call."""

    def __init__(self, target: Callable[..., Any], kind: str, pool: Any) -> None:
        super().__init__()
        self.target = target
        self._kind, self._pool = kind, pool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The target's call, and the leak."""
        try:
            outputs = self.target(*args, **kwargs)
        except BaseException:
            if self._kind == "fault":
                KEPT.append(_copy_of((args, kwargs)))
            raise
        if self._kind == "storage":
            KEPT.append(_copy_of(outputs))
        elif self._kind == "graph":
            KEPT.append(outputs)
        elif self._kind == "object":
            KEPT.append(object())
        elif self._kind == "lease":
            self._pool.allocate((1,))  # poolaudit: ignore[PA104] - this is the leak
        return outputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "target":
                raise
            return getattr(self.target, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Planted:
        import copy

        return Planted(copy.deepcopy(self.target, memo), self._kind, self._pool)


def plant(target: Callable[..., Any], kind: str = "storage", *, pool: Any = None) -> Planted:
    """The target with one leak a call: a `storage` of one element, its `graph`, a bare Python `object`, a
    `lease` of `pool`, or, each time it fails, its input (`fault`).
    """
    if kind not in ("storage", "graph", "object", "lease", "fault"):
        raise ValueError(f"no planted leak {kind!r}; there are storage, graph, object, lease and fault")
    if kind == "lease" and pool is None:
        raise ValueError("a planted lease needs the pool it is taken from: plant(target, 'lease', pool=...)")
    KEPT.clear()
    return Planted(target, kind, pool)


def _copy_of(values: Any) -> torch.Tensor:
    first = next(tensors_in(values), None)
    with torch.no_grad():
        return torch.zeros(1) if first is None or first.numel() == 0 else first.flatten()[:1].clone()
