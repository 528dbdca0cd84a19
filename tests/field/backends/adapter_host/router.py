"""Routes requests to adapters and keeps conversations on theirs."""
from __future__ import annotations

from .adapters import AdapterTable, Resident


class Router:
    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        self._pinned: dict[str, Resident] = {}

    def infer(self, name: str, text: str) -> str | None:
        resident = self._table.use(name, 8)  # clean: the use ends in the finally
        if resident is None:
            return None
        try:
            return f"{resident.bank.index}:{text}"
        finally:
            self._table.end_use(resident)

    def infer_mixed(self, names: list[str], text: str) -> str | None:
        used: list[Resident] = []
        for name in names:
            resident = self._table.use(name, 8)  # clean: near miss, a refusal breaks to the loop that ends all
            if resident is None:
                break
            used.append(resident)
        complete = len(used) == len(names)
        answer = "+".join(str(r.bank.index) for r in used) + text
        for resident in used:
            self._table.end_use(resident)
        return answer if complete else None

    def infer_fallback(self, name: str, base: str, text: str) -> str | None:
        resident = self._table.use(name, 16)  # leak: too low a rank rebinds the name to the base adapter
        if resident is None or resident.bank.rank < 16:
            resident = self._table.use(base, 16)  # clean: the use ends below
        if resident is None:
            return None
        answer = f"{resident.name}:{text}"
        self._table.end_use(resident)
        return answer

    def pin(self, conversation: str, name: str) -> bool:
        resident = self._table.use(name, 8)  # leak: pinned again, the conversation's former use is overwritten
        if resident is None:
            return False
        self._pinned[conversation] = resident
        return True

    def repin(self, conversation: str, name: str) -> bool:
        resident = self._table.use(name, 8)  # clean: near miss, unpin ends the former use before the table is set
        if resident is None:
            return False
        self.unpin(conversation)
        self._pinned[conversation] = resident
        return True

    def unpin(self, conversation: str) -> None:
        resident = self._pinned.pop(conversation, None)
        if resident is not None:
            self._table.end_use(resident)
