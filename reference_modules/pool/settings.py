"""What a pool was made with, checked once: a pool pickles and deep-copies as these settings, without memory
and leases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from reference_modules.pool.errors import PoolError, PoolValueError

BACKENDS = ("auto", "lease", "native")
FaultHook = Callable[[int], object]
"""Called with the bytes of every allocation before anything is held; what it raises, the caller gets."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `TensorPool`, resolved."""

    device: torch.device
    name: str
    max_bytes: int | None
    threshold_mb: float | None
    backend: str
    tracking: bool
    debug: bool

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise PoolValueError(
                f"pool {self.name!r}: max_bytes={self.max_bytes} leaves no room for any tensor; "
                "give a positive number of bytes, or None for no limit"
            )
        if self.threshold_mb is not None and not self.threshold_mb >= 0:
            raise PoolValueError(
                f"pool {self.name!r}: threshold_mb={self.threshold_mb} must be 0 (pool everything) or "
                "more, or None (measured)"
            )


def resolve_device(device: str | int | torch.device) -> torch.device:
    """The device with its index, so that `cuda` and `cuda:0` are one place."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PoolValueError(
            f"no pool can live on device {device!r}: {error}; use 'cpu' or 'cuda[:index]'"
        ) from error
    if resolved.type not in ("cpu", "cuda"):
        raise PoolValueError(
            f"no pool can live on device {device!r}: it has no memory that could be pooled or no backend "
            "here; use 'cpu' or 'cuda[:index]'"
        )
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


def resolve_backend(backend: str, device: torch.device, name: str) -> str:
    """`auto` decided, an impossible pair of backend and device refused."""
    if backend not in BACKENDS:
        raise PoolValueError(
            f"pool {name!r}: unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}"
        )
    fitting = "native" if device.type == "cuda" else "lease"
    if backend not in ("auto", fitting):
        raise PoolValueError(
            f"pool {name!r}: backend {backend!r} does not serve {device}; use {fitting!r} or 'auto'"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PoolError(f"pool {name!r}: this torch sees no CUDA device; use device='cpu'")
    return fitting
