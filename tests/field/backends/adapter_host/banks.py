"""Banks: the places on the device where an adapter's weights can sit."""
from __future__ import annotations

import threading
from typing import Callable


class Bank:
    def __init__(self, index: int) -> None:
        self.index = index
        self.adapter = ""
        self.rank = 0

    def load(self, adapter: str, rank: int) -> bool:
        if rank > 64:
            return False
        self.adapter, self.rank = adapter, rank
        return True


class BankSet:
    def __init__(self, count: int) -> None:
        self._mutex = threading.Lock()
        self._banks = [Bank(i) for i in range(count)]

    def claim(self) -> Bank | None:
        with self._mutex:
            return self._banks.pop() if self._banks else None  # clean: handed to the caller

    def claim_if(self, wanted: Callable[[Bank], bool]) -> Bank | None:
        self._mutex.acquire()  # leak: the bank that fits is returned with the mutex locked
        for i, bank in enumerate(self._banks):
            if wanted(bank):
                del self._banks[i]  # clean: handed to the caller
                return bank
        self._mutex.release()
        return None

    def surrender(self, bank: Bank) -> None:
        with self._mutex:
            self._banks.append(bank)

    def count(self) -> int:
        self._mutex.acquire()  # clean: near miss, the return runs through the finally
        try:
            return len(self._banks)
        finally:
            self._mutex.release()
