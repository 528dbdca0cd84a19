"""Recurrent (Mamba-like) state cache: one row of conv and ssm state per sequence."""
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Dict, Iterable, List, Optional, Tuple, Type

import torch

logger = logging.getLogger(__name__)
PAD = -1


@dataclass
class SSMConfig:
    rows: int = 128
    conv_dim: int = 4
    state_dim: int = 16
    allow_pad: bool = True


class StateRows:
    def __init__(self, cfg: SSMConfig) -> None:
        self.cfg = cfg
        self.conv = torch.zeros(cfg.rows, cfg.conv_dim)
        self.ssm = torch.zeros(cfg.rows, cfg.state_dim)
        self._free = torch.arange(cfg.rows - 1, -1, -1)
        self._top = cfg.rows

    def alloc_row(self) -> int:
        if self._top == 0:
            return PAD
        self._top -= 1
        return int(self._free[self._top])

    def dealloc_row(self, row: int) -> None:
        self._free[self._top] = row
        self._top += 1

    def alloc_rows(self, n: int) -> Optional[torch.Tensor]:
        if self._top < n:
            return None
        self._top -= n
        return self._free[self._top : self._top + n].clone()

    def dealloc_rows(self, rows: torch.Tensor) -> None:
        n = rows.numel()
        self._free[self._top : self._top + n] = rows
        self._top += n


class RowLease:
    """Context manager over one row."""

    def __init__(self, rows: StateRows, keep: bool = False) -> None:
        self.rows = rows
        self.keep = keep
        self.row = PAD

    def __enter__(self) -> int:
        self.row = self.rows.alloc_row()  # clean: near miss, __exit__ skips the dealloc for PAD only
        return self.row

    def __exit__(
        self,
        et: Optional[Type[BaseException]],
        ev: Optional[BaseException],
        tb: Optional[TracebackType],
    ) -> None:
        if self.row == PAD:
            return
        self.rows.dealloc_row(self.row)
        self.row = PAD


class PairLease:
    def __init__(self, rows: StateRows) -> None:
        self.rows = rows
        self.a = PAD
        self.b = PAD

    def __enter__(self) -> Tuple[int, int]:
        self.a = self.rows.alloc_row()  # clean: __exit__ deallocates
        self.b = self.rows.alloc_row()  # leak: __exit__ forgets the second field
        return self.a, self.b

    def __exit__(self, *exc: object) -> bool:
        if self.a != PAD:
            self.rows.dealloc_row(self.a)
        self.a = self.b = PAD
        return False


class StateCache:
    def __init__(self, rows: StateRows) -> None:
        self.rows = rows
        self.by_seq: Dict[str, int] = {}
        self.batch: Optional[torch.Tensor] = None

    def get_or_alloc(self, rid: str) -> int:
        if rid not in self.by_seq:
            row = self.rows.alloc_row()  # clean: PAD is not stored, a real row is and finish() deallocates it
            if row == PAD:
                return PAD
            self.by_seq[rid] = row
        return self.by_seq[rid]

    def finish(self, rids: Iterable[str]) -> None:
        for rid in rids:
            row = self.by_seq.pop(rid, PAD)
            if row != PAD:
                self.rows.dealloc_row(row)

    def fork(self, parent: str, children: List[str]) -> bool:
        rows = self.rows.alloc_rows(len(children))  # clean: near miss, each row is stored under a child
        if rows is None:
            return False
        src = self.by_seq[parent]
        for rid, row in zip(children, rows.tolist()):
            self.finish([rid])
            self.rows.ssm[row].copy_(self.rows.ssm[src])
            self.by_seq[rid] = row
        return True

    def fork_known(self, parent: str, children: List[str]) -> bool:
        rows = self.rows.alloc_rows(len(children))  # leak: an unknown parent returns False with the rows
        if rows is None:
            return False
        if parent not in self.by_seq:
            logger.warning("fork of unknown %s", parent)
            return False
        for rid, row in zip(children, rows.tolist()):
            self.finish([rid])
            self.by_seq[rid] = row
        return True

    def begin_batch(self, n: int) -> torch.Tensor:
        self.end_batch()
        rows = self.rows.alloc_rows(n)  # clean: end_batch() deallocates the field
        if rows is None:
            raise RuntimeError("state rows exhausted")
        self.batch = rows
        return rows

    def end_batch(self) -> None:
        if self.batch is not None:
            self.rows.dealloc_rows(self.batch)
            self.batch = None

    def warm(self, n: int) -> float:
        rows = self.rows.alloc_rows(n)  # leak: row 0 is filtered out and never deallocated
        if rows is None:
            return 0.0
        total = self.rows.ssm[rows].sum().item()
        self.rows.dealloc_rows(rows[rows >= 1])
        return total

    def checksum(self, n: int) -> float:
        rows = self.rows.alloc_rows(n)  # clean: near miss, sorting is a permutation of the same rows
        if rows is None:
            return 0.0
        order = rows.sort().values
        total = self.rows.ssm[order].sum().item()
        self.rows.dealloc_rows(order)
        return total

    def step_padded(self, x: torch.Tensor) -> torch.Tensor:
        row = self.rows.alloc_row()  # leak: where the config forbids padding it returns although a row was got
        if row == PAD or not self.rows.cfg.allow_pad:
            return x
        self.rows.conv[row].copy_(x)
        y = self.rows.conv[row] * 2
        self.rows.dealloc_row(row)
        return y

    def step_leased(self, x: torch.Tensor) -> torch.Tensor:
        with RowLease(self.rows) as row:  # clean: with statement
            if row == PAD:
                return x
            self.rows.conv[row].copy_(x)
            return self.rows.conv[row] * 2

    def step_manual(self, x: torch.Tensor) -> torch.Tensor:
        lease = RowLease(self.rows)
        row = lease.__enter__()  # leak: the last return leaves without __exit__
        if row == PAD:
            return x
        if x.abs().sum() == 0:
            lease.__exit__(None, None, None)
            return x
        self.rows.conv[row].copy_(x)
        return self.rows.conv[row] * 2
