from __future__ import annotations

from typing import Callable, Dict, List, Optional

from .inventory import Inventory, Node
from .journal import Journal


class DrainFailed(Exception):
    pass


class Rotation:
    def __init__(self, inv: Inventory, journal: Journal, drain: Callable[[Node], None]):
        self.inv = inv
        self.journal = journal
        self.drain = drain
        self.spares: List[Node] = []
        self.repairs: Dict[str, Node] = {}

    def keep_spares(self, n: int) -> int:
        while len(self.spares) < n:
            node = self.inv.claim_healthy("spare")  # clean: kept in spares, release_spares surrenders
            if node is None:
                break
            self.spares.append(node)
        return len(self.spares)

    def release_spares(self) -> None:
        while self.spares:
            self.inv.surrender(self.spares.pop())

    def drain_one(self, rack: str) -> bool:
        node = self.inv.claim("drain", rack)  # leak: DrainFailed is journalled and survived without surrender
        if node is None:
            return False
        try:
            self.drain(node)
        except DrainFailed as exc:
            self.journal.write({"kind": "drain-failed", "node": node.name, "why": str(exc)})
            return False
        self.inv.surrender(node)
        return True

    def drain_rack(self, rack: str, limit: int) -> int:
        done = 0
        for _ in range(limit):
            node = self.inv.claim("drain", rack)  # clean: near miss, surrendered in finally also on the continue
            if node is None:
                break
            try:
                self.drain(node)
            except DrainFailed:
                continue
            else:
                done += 1
            finally:
                self.inv.surrender(node)
        return done

    def send_to_repair(self, ticket: str, rack: Optional[str] = None) -> bool:
        node = self.inv.claim("repair", rack)  # leak: close_ticket for a healed node pops it and returns before surrender
        if node is None:
            return False
        if ticket in self.repairs:
            self.inv.surrender(node)
            return False
        self.repairs[ticket] = node
        return True

    def close_ticket(self, ticket: str) -> str:
        node = self.repairs.pop(ticket, None)
        if node is None:
            return "unknown"
        if node.healthy:
            return "healed"
        node.healthy = True
        self.inv.surrender(node)
        return "repaired"

    def compare(self, probe: Callable[[Node, Node], float]) -> Optional[float]:
        a = self.inv.claim("compare")  # clean: surrendered also when b is None
        if a is None:
            return None
        b = self.inv.claim("compare", a.rack)  # clean: None-checked and surrendered
        if b is None:
            self.inv.surrender(a)
            return None
        value = probe(a, b)
        for node in (a, b):
            self.inv.surrender(node)
        return value

    def note(self, ident: str, text: str) -> None:
        self.journal.incident_log(ident).write(text + "\n")  # clean: near miss, the journal keeps the handle
