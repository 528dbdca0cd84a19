from __future__ import annotations

from typing import Dict, List, Optional

import torch

from . import conns
from .session import Session, open_session


class BatchLoader:
    def __init__(self, table: str):
        self.table = table
        self.columns: Dict[str, torch.Tensor] = {}

    def fetch_column(self, s: Session, name: str, n: int) -> torch.Tensor:
        """A pooled column; the caller puts it back."""
        rows = s.query(f"select {name} from {self.table} limit {n}")
        col = conns.column(n)  # clean: returned to the caller
        col[: len(rows)] = torch.tensor([float(r[0]) for r in rows])
        col[len(rows) :].zero_()
        return col

    def mean(self, name: str, n: int) -> float:
        with open_session() as s:  # clean: with statement closes it
            return self.fetch_column(s, name, n).mean().item()  # leak: the pooled column is averaged and dropped

    def standardised(self, name: str, n: int) -> Optional[torch.Tensor]:
        with open_session() as s:  # clean: with statement closes it
            col = self.fetch_column(s, name, n)  # leak: a constant column is not put back
        std = col.std()
        if std == 0:
            return None
        out = (col - col.mean()) / std
        conns.put_column(col)
        return out

    def load(self, names: List[str], n: int) -> None:
        with open_session() as s:  # clean: with statement closes it
            for name in names:
                if name in self.columns:
                    conns.put_column(self.columns.pop(name))
                self.columns[name] = self.fetch_column(s, name, n)  # clean: near miss, the one before was put back, unload() does the rest

    def unload(self) -> None:
        while self.columns:
            _, col = self.columns.popitem()
            conns.put_column(col)

    def count(self) -> int:
        s = open_session()  # leak: not closed when the table is empty
        rows = s.query(f"select count(*) from {self.table}")
        if not rows or rows[0][0] == 0:
            return 0
        s.close()
        return int(rows[0][0])
