"""Casts between training and wire precision. Encoders return staging tensors, which the caller racks."""
from __future__ import annotations

import torch

from .staging import STAGE


def to_wire(t: torch.Tensor) -> torch.Tensor:
    out = STAGE.pull(tuple(t.shape), torch.bfloat16)  # clean: returned to the caller
    out.copy_(t)
    return out


def amax_scale(t: torch.Tensor) -> float:
    wire = to_wire(t)  # clean: racked before the return
    top = float(wire.abs().max())
    STAGE.rack(wire)
    return 1.0 if top == 0 else 448.0 / top


def round_trip(t: torch.Tensor) -> torch.Tensor:
    """What t becomes once it went over the wire."""
    return to_wire(t).float()  # leak: float() copies, the staging tensor is dropped


def error(t: torch.Tensor) -> float:
    wire = to_wire(t)  # leak: an empty tensor returns before rack()
    if t.numel() == 0:
        return 0.0
    err = float((wire.float() - t).abs().max())
    STAGE.rack(wire)
    return err
