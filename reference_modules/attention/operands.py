"""What one kernel call works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Places = list[list[tuple[int, int, int]]]


@dataclass(frozen=True, slots=True)
class Operands:
    """B segments (times batch), H heads, L query rows, S key rows, D head dimension.

    `keys_BHS` is True where a key may be seen, None where all may.  `places` tells segments and heads apart
    for dropout: B lists of H.
    """

    q_BHLD: Tensor
    k_BHSD: Tensor
    v_BHSD: Tensor
    scale: float
    causal: bool
    keys_BHS: Tensor | None = None
    places: Callable[[], Places] | None = None

    def rows_with_a_key(self) -> Tensor:
        """(B, H, L): whether row l may see any key that the mask leaves; only where there is a mask."""
        assert self.keys_BHS is not None
        if self.causal:
            return self.keys_BHS.cumsum(-1) > 0
        return self.keys_BHS.any(-1, keepdim=True).expand(-1, -1, self.q_BHLD.shape[2])

    def bias_BHLS(self) -> Tensor | None:
        """The mask as something to add to scores: 0 or −inf."""
        if self.keys_BHS is None:
            return None
        bias_BHS = torch.zeros(self.keys_BHS.shape, dtype=self.q_BHLD.dtype, device=self.q_BHLD.device)
        bias_BHS.masked_fill_(~self.keys_BHS, float("-inf"))
        return bias_BHS.unsqueeze(2).expand(-1, -1, self.q_BHLD.shape[2], -1)
