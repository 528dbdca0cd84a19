"""State slots for hybrid (attention + SSM) models."""
from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import closing, contextmanager
from typing import Literal

import torch

Mode = Literal["owned", "shared"]


class StatePool:
    def __init__(self, n: int, conv: tuple[int, int], ssm: tuple[int, int]) -> None:
        self.conv_state = torch.zeros(n, *conv)
        self.ssm_state = torch.zeros(n, *ssm)
        self._stack = torch.arange(n)
        self._top = n

    def acquire_state(self) -> int | None:
        if self._top == 0:
            return None
        self._top -= 1
        return int(self._stack[self._top])

    def release_state(self, idx: int) -> None:
        self._stack[self._top] = idx
        self._top += 1

    def copy(self, src: int, dst: int) -> None:
        self.conv_state[dst] = self.conv_state[src]
        self.ssm_state[dst] = self.ssm_state[src]


class StateRef:
    """Either owns its slot or looks at somebody else's."""

    def __init__(self, pool: StatePool, idx: int, mode: Mode) -> None:
        self.pool, self.idx, self.mode = pool, idx, mode

    def close(self) -> None:
        if self.mode == "owned" and self.idx >= 0:
            self.pool.release_state(self.idx)
            self.idx = -1


class StateTable(MutableMapping[str, int]):
    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self._d: dict[str, int] = {}

    def __getitem__(self, k: str) -> int:
        return self._d[k]

    def __setitem__(self, k: str, v: int) -> None:
        if k in self._d:
            self.pool.release_state(self._d[k])
        self._d[k] = v

    def __delitem__(self, k: str) -> None:
        self.pool.release_state(self._d.pop(k))

    def __iter__(self) -> Iterator[str]:
        return iter(self._d)

    def __len__(self) -> int:
        return len(self._d)

    def ensure(self, rid: str) -> bool:
        idx = self.pool.acquire_state()  # clean: near miss, __setitem__ releases a state that was there
        if idx is None:
            return False
        self[rid] = idx
        return True

    def ensure_raw(self, rid: str) -> bool:
        if rid in self._d:
            return True
        idx = self.pool.acquire_state()  # clean: near miss, only new keys, __delitem__ releases
        if idx is None:
            return False
        self._d[rid] = idx
        return True

    def fork(self, src: str, dst: str) -> bool:
        idx = self.pool.acquire_state()  # leak: an unknown source leaves with the state acquired
        if idx is None or src not in self._d:
            return False
        self.pool.copy(self._d[src], idx)
        self[dst] = idx
        return True


def make_ref(pool: StatePool, share: StateRef | None) -> StateRef | None:
    if share is not None:
        return StateRef(pool, share.idx, "shared")
    idx = pool.acquire_state()  # clean: handed to the caller as an owned reference
    if idx is None:
        return None
    return StateRef(pool, idx, "owned")


@contextmanager
def temp_state(pool: StatePool) -> Iterator[int | None]:
    idx = pool.acquire_state()  # clean: near miss, the None case yields first and leaves
    if idx is None:
        yield None
        return
    try:
        yield idx
    finally:
        pool.release_state(idx)


class MambaRunner:
    def __init__(self, pool: StatePool, kernel) -> None:
        self.pool = pool
        self.kernel = kernel
        self.table = StateTable(pool)

    def prefill(self, x: torch.Tensor) -> torch.Tensor | None:
        with temp_state(self.pool) as idx:  # clean: with block, early return included
            if idx is None:
                return None
            return self.kernel(x, self.pool.ssm_state[idx]).clone()

    def verify(self, x: torch.Tensor, base: StateRef | None) -> torch.Tensor | None:
        ref = make_ref(self.pool, base)  # clean: near miss, closing() closes and close() looks at the mode
        if ref is None:
            return None
        with closing(ref):
            return self.kernel(x, self.pool.ssm_state[ref.idx])

    def verify_fast(self, x: torch.Tensor, base: StateRef | None) -> torch.Tensor | None:
        ref = make_ref(self.pool, base)  # leak: closed only where it was shared
        if ref is None:
            return None
        y = self.kernel(x, self.pool.ssm_state[ref.idx])
        if ref.mode == "shared":
            ref.close()
        return y

    def rollback(self, rid: str, xs: list[torch.Tensor]) -> torch.Tensor | None:
        backup = self.pool.acquire_state()  # leak: released only if the rollback happened
        if backup is None:
            return None
        self.pool.copy(self.table[rid], backup)
        for x in xs:
            y = self.kernel(x, self.pool.ssm_state[self.table[rid]])
            if torch.isnan(y).any():
                self.pool.copy(backup, self.table[rid])
                self.pool.release_state(backup)
                return None
        return y

    def rollback_swap(self, rid: str, x: torch.Tensor) -> None:
        work = self.pool.acquire_state()  # clean: near miss, either stored under rid or released
        if work is None:
            return
        self.pool.copy(self.table[rid], work)
        y = self.kernel(x, self.pool.ssm_state[work])
        if torch.isfinite(y).all():
            self.table[rid] = work
        else:
            self.pool.release_state(work)

    def bench(self, n: int) -> int:
        refs = [make_ref(self.pool, None) for _ in range(n)]  # leak: the references are counted and never closed
        return sum(r is not None for r in refs)
