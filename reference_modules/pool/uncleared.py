"""What a lease holds before the first write, and when a block cannot be written at all."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

POISON = 0xFF
"""Every byte of it: NaN in all floating formats, -1 in the signed ones, the largest number in the others."""


def poison(tensor: torch.Tensor) -> None:
    """Make a read before the first write visible (debug mode)."""
    if tensor.dtype is torch.bool:  # only 0 and 1 are booleans
        tensor.fill_(True)
    else:
        torch.tensor((), dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(POISON)


def memory_is_out_of_reach() -> bool:
    """Whether the pool must step aside: under a FakeTensorMode nothing has memory, and inside a functional
    transform (torch.func) a block made outside it may not be written.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(type(mode).__name__ == "FakeTensorMode" for mode in _get_current_dispatch_mode_stack())
