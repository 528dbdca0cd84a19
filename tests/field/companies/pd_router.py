"""Prefill/decode router with bootstrap rooms and per-pair transfer tickets."""

import logging
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

logger = logging.getLogger("pd_router")


class RoomRegistry:
    def __init__(self, n: int) -> None:
        self._rooms = [True] * n
        self._lock = threading.Lock()

    def open_room(self) -> int:
        with self._lock:  # clean: with releases
            for i, free in enumerate(self._rooms):
                if free:
                    self._rooms[i] = False
                    return i
        return -1

    def close_room(self, room: int) -> None:
        with self._lock:  # clean: with releases
            self._rooms[room] = True


class Tickets:
    """A counter of concurrent transfers per decode node."""

    def __init__(self, per_node: int) -> None:
        self.per_node = per_node
        self._n: Dict[str, int] = {}

    def acquire_ticket(self, node: str) -> bool:
        if self._n.get(node, 0) >= self.per_node:
            return False
        self._n[node] = self._n.get(node, 0) + 1
        return True

    def release_ticket(self, node: str) -> None:
        self._n[node] -= 1


@dataclass
class Route:
    rid: str
    room: int
    prefill: str
    decode: str
    ticket: bool = True


class Router:
    def __init__(self, rooms: RoomRegistry, tickets: Tickets, prefills: List[str], decodes: List[str]) -> None:
        self.rooms = rooms
        self.tickets = tickets
        self.prefills = prefills
        self.decodes = decodes
        self.routes: Dict[str, Route] = {}
        self._table_lock = threading.Lock()

    def _pick(self, rid: str) -> Tuple[str, str]:
        h = hash(rid)
        return self.prefills[h % len(self.prefills)], self.decodes[h % len(self.decodes)]

    def route(self, rid: str) -> Optional[Route]:
        self.finish(rid)
        p, d = self._pick(rid)
        if not self.tickets.acquire_ticket(d):  # clean: near miss, released where there is no room, by finish() otherwise
            return None
        room = self.rooms.open_room()  # clean: in the route, finish() closes it
        if room < 0:
            self.tickets.release_ticket(d)
            return None
        r = Route(rid, room, p, d)
        self.routes[rid] = r
        return r

    def route_local(self, rid: str) -> Optional[Route]:
        self.finish(rid)
        p, d = self._pick(rid)
        room = self.rooms.open_room()  # leak: the missing ticket returns with the room open
        if room < 0:
            return None
        if p != d and not self.tickets.acquire_ticket(d):  # clean: near miss, the route remembers whether it has one
            return None
        r = Route(rid, room, p, d, ticket=p != d)
        self.routes[rid] = r
        return r

    def finish(self, rid: str) -> None:
        r = self.routes.pop(rid, None)
        if r is None:
            return
        self.rooms.close_room(r.room)
        if r.ticket:
            self.tickets.release_ticket(r.decode)

    def purge(self) -> int:
        n = len(self.routes)
        for rid in list(self.routes):
            self.finish(rid)
        return n

    def probe(self, node: str) -> bool:
        room = self.rooms.open_room()  # leak: closed for a node that has tickets only
        if room < 0:
            return False
        if self.tickets.acquire_ticket(node):  # clean: released at once
            self.tickets.release_ticket(node)
            self.rooms.close_room(room)
            return True
        return False

    def drain_node(self, node: str) -> int:
        got = 0
        while self.tickets.acquire_ticket(node):  # clean: near miss, takes all that are left and gives the same number back
            got += 1
        for _ in range(got):
            self.tickets.release_ticket(node)
        return got

    def quiesce(self, node: str) -> int:
        got = 0
        while self.tickets.acquire_ticket(node):  # leak: one release for any number of tickets
            got += 1
        if got:
            self.tickets.release_ticket(node)
        return got

    def update(self, rid: str, decode: str) -> bool:
        self._table_lock.acquire()  # leak: returns under the lock for an unknown id
        r = self.routes.get(rid)
        if r is None:
            return False
        try:
            r.prefill = decode
        finally:
            self._table_lock.release()
        return True

    def set_prefill(self, rid: str, prefill: str) -> bool:
        if not self._table_lock.acquire(timeout=1.0):  # clean: near miss, False took nothing, the finally releases
            return False
        try:
            r = self.routes.get(rid)
            if r is None:
                return False
            r.prefill = prefill
            return True
        finally:
            self._table_lock.release()

    def batch(self, rids: List[str]) -> List[int]:
        rooms: List[int] = []
        for rid in rids:
            room = self.rooms.open_room()  # leak: rids that are routed are skipped after the room was opened
            if room == -1:
                break
            if rid in self.routes:
                continue
            rooms.append(room)
        return rooms

    def with_rooms(self, rids: List[str]) -> int:
        rooms = self.batch(rids)  # clean: all that come are closed
        try:
            return len(rooms)
        finally:
            for room in rooms:
                self.rooms.close_room(room)

    def first_room(self, rids: List[str]) -> int:
        room, *rest = self.batch(rids)  # leak: the first is used and closed, the rest stays open
        self.rooms.close_room(room)
        return room if rest else -1
