"""From which size on a pool reuses memory: measured on this machine by `calibrate`, 16 MB where nothing was
measured.
"""

from __future__ import annotations

import torch

UNMEASURED_MB = 16.0

_measured: dict[str, float] = {}
"""By device type; for the life of the process."""


def default(device: torch.device) -> float:
    """The threshold in MB for pools that were given none."""
    return _measured.get(device.type, UNMEASURED_MB)


def remember(device: torch.device, megabytes: float) -> None:
    """What was measured, for pools made from now on."""
    _measured[device.type] = megabytes


def forget() -> None:
    """Back to the unmeasured default."""
    _measured.clear()
