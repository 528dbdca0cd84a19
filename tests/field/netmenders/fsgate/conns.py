"""Module-level pool of store connections and of column tensors."""
from __future__ import annotations

import queue
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

_connect: Optional[Callable[[], Any]] = None
_idle: "queue.LifoQueue[Any]" = queue.LifoQueue()
_gate = threading.BoundedSemaphore(8)
_columns: Dict[Tuple[int, torch.dtype], List[torch.Tensor]] = {}


class StoreDown(Exception):
    pass


def configure(connect: Callable[[], Any], limit: int) -> None:
    global _connect, _gate
    _connect = connect
    _gate = threading.BoundedSemaphore(limit)


def checkout_conn() -> Any:
    _gate.acquire()  # leak: the permit is kept when connect() fails with OSError
    try:
        conn = _idle.get_nowait()  # clean: handed to the caller
    except queue.Empty:
        try:
            conn = _connect()
        except OSError as e:
            raise StoreDown(str(e)) from e
    return conn


def return_conn(conn: Any) -> None:
    if not conn.closed:
        _idle.put(conn)
    _gate.release()


def column(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    stack = _columns.get((n, dtype))
    return stack.pop() if stack else torch.empty(n, dtype=dtype)


def put_column(t: torch.Tensor) -> None:
    _columns.setdefault((t.numel(), t.dtype), []).append(t)
