from typing import List, Optional

import torch


class ReqToTokenPool:
    """Rows of the request-to-token table."""

    def __init__(self, size: int, max_ctx: int):
        self.table = torch.zeros(size, max_ctx, dtype=torch.int32)
        self._free_rows = list(range(size))

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free_rows):
            return None
        rows, self._free_rows = self._free_rows[:n], self._free_rows[n:]
        return rows

    def free(self, rows) -> None:
        if isinstance(rows, int):
            rows = [rows]
        self._free_rows.extend(rows)


class TokenToKVPool:
    def __init__(self, size: int):
        self._mask = torch.ones(size, dtype=torch.bool)

    def alloc_tokens(self, n: int) -> Optional[torch.Tensor]:
        idx = self._mask.nonzero(as_tuple=True)[0][:n]
        if idx.numel() < n:
            return None
        self._mask[idx] = False
        return idx

    def free_tokens(self, idx: torch.Tensor) -> None:
        self._mask[idx] = True
