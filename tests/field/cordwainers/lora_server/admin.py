"""Operator commands."""
from __future__ import annotations

import logging
from types import TracebackType

import torch

from .engine import Engine, LoraRequest
from .slots import AdapterTable, Resident

log = logging.getLogger("lora.admin")


class Hold:
    """Keeps an adapter resident while an operator works on it."""

    def __init__(self, table: AdapterTable, name: str) -> None:
        self.table = table
        self.name = name
        self.res: Resident | None = None

    def __enter__(self) -> Resident | None:
        self.res = self.table.ref(self.name)  # clean: __exit__ undoes it
        return self.res

    def __exit__(self, et: type | None, ev: BaseException | None, tb: TracebackType | None) -> bool:
        if self.res is not None:
            self.table.unref(self.res)
        return False


class QuietHold(Hold):
    """As Hold, and swallows lookups of keys that are absent."""

    def __enter__(self) -> Resident | None:
        self.res = self.table.ref(self.name)  # leak: __exit__ below never calls unref
        return self.res

    def __exit__(self, et: type | None, ev: BaseException | None, tb: TracebackType | None) -> bool:
        log.debug("left %s", self.name)
        return et is not None and issubclass(et, KeyError)


def export(table: AdapterTable, name: str, path: str) -> bool:
    with Hold(table, name) as res:  # clean: context manager
        if res is None:
            return False
        with open(path, "wb") as f:  # clean: context manager
            torch.save(table.bank.weights[res.slot, : res.rank].clone(), f)
    return True


def compare(table: AdapterTable, left: str, right: str) -> float | None:
    a = table.ref(left)  # leak: the left reference stays when the right adapter is not resident
    if a is None:
        return None
    b = table.ref(right)  # clean: unreferenced with the left one
    if b is None:
        log.info("%s is not resident", right)
        return None
    w = table.bank.weights
    diff = float((w[a.slot] - w[b.slot]).abs().max())
    table.unref(a)
    table.unref(b)
    return diff


def smoke(engine: Engine, names: list[str], x: torch.Tensor) -> dict[str, bool]:
    ok: dict[str, bool] = {}
    for i, name in enumerate(names):
        req = LoraRequest(-1 - i, name, [1, 2, 3], max_new=0)
        if not engine.start(req):
            ok[name] = False
            continue
        ok[name] = not bool(torch.isnan(engine.deltas(x)).any())
        engine.retire(req.rid)
    return ok


def log_header(path: str, table: AdapterTable) -> str:
    f = open(path)  # leak: a file that does not start with the mark returns without close
    first = f.readline()
    if not first.startswith("#"):
        return ""
    header = first + f.readline()
    f.close()
    return header
