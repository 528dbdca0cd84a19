"""One pool a device for whoever does not want to pass pools around."""

from __future__ import annotations

import threading

import torch

from reference_modules.pool.settings import resolve_device
from reference_modules.pool.tensor_pool import TensorPool

_pools: dict[torch.device, TensorPool] = {}
_making = threading.Lock()


def get_global_memory_pool(device: str | int | torch.device | None = None) -> TensorPool:
    """The process's pool for this device (None: torch's default device), made when first asked for, and anew
    once it was closed.
    """
    home = resolve_device(torch.get_default_device() if device is None else device)
    pool = _pools.get(home)
    if pool is not None and not pool.closed:
        return pool
    with _making:
        pool = _pools.get(home)
        if pool is None or pool.closed:
            pool = _pools[home] = TensorPool(home, name=f"global-{home}")
        return pool
