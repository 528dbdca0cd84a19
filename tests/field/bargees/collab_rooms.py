"""Collaborative rooms over websockets: seats, cursor colours and uplink permits of the members."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


class NumberPlate:
    """Hands out small integers; waits when all of them are in use."""

    def __init__(self, size: int) -> None:
        self._numbers = asyncio.Queue()
        for i in range(size):
            self._numbers.put_nowait(i)

    async def book(self) -> int:
        return await self._numbers.get()

    def unbook(self, number: int) -> None:
        self._numbers.put_nowait(number)


class Uplink:
    def __init__(self, permits: int) -> None:
        self._permits = permits
        self._tickets: set[int] = set()
        self._last = 0

    def enter(self) -> int | None:
        if len(self._tickets) >= self._permits:
            return None
        self._last += 1
        self._tickets.add(self._last)
        return self._last

    def leave(self, ticket: int) -> None:
        self._tickets.discard(ticket)


@dataclass
class Member:
    uid: str
    seat: int
    colour: int
    tabs: int = 1


class Room:
    def __init__(self, seats: NumberPlate, colours: NumberPlate, uplink: Uplink) -> None:
        self.seats = seats
        self.colours = colours
        self.uplink = uplink
        self.members: dict[str, Member] = {}
        self.viewers: dict[str, int] = {}
        self.guests: dict[str, int] = {}
        self.speakers: list[tuple[str, int]] = []
        self.uploads: dict[str, list[int]] = {}
        self.exports: dict[str, int] = {}

    async def join(self, uid: str) -> Member:
        seat = await self.seats.book()  # clean: near miss, unbooked when the user is in already, else by part
        colour = await self.colours.book()  # leak: not unbooked where the user came in with another tab
        member = self.members.get(uid)
        if member is not None:
            member.tabs += 1
            self.seats.unbook(seat)
            return member
        member = Member(uid, seat, colour)
        self.members[uid] = member
        return member

    def part(self, uid: str) -> None:
        member = self.members[uid]
        member.tabs -= 1
        if member.tabs > 0:
            return
        del self.members[uid]
        self.seats.unbook(member.seat)
        self.colours.unbook(member.colour)

    async def watch(self, uid: str) -> int:
        """Called for each tab; a viewer has one seat whatever the number of tabs."""
        seat = self.viewers.setdefault(uid, await self.seats.book())  # leak: lost where uid has a seat
        logger.info("%s watches from %d", uid, seat)
        return seat

    def unwatch(self, uid: str) -> None:
        seat = self.viewers.pop(uid, None)
        if seat is not None:
            self.seats.unbook(seat)

    async def invite(self, uid: str) -> int:
        fresh = await self.seats.book()  # clean: near miss, unbooked when setdefault keeps the seat of before
        seat = self.guests.setdefault(uid, fresh)
        if seat != fresh:
            self.seats.unbook(fresh)
        return seat

    def dismiss(self, uid: str) -> None:
        if uid in self.guests:
            self.seats.unbook(self.guests.pop(uid))

    def speak(self, uid: str) -> bool:
        ticket = self.uplink.enter()  # clean: near miss, both halves of hush's split list are looked after
        if ticket is None:
            return False
        self.speakers.append((uid, ticket))
        return True

    def hush(self, uid: str) -> int:
        silenced = [t for who, t in self.speakers if who == uid]
        self.speakers = [(who, t) for who, t in self.speakers if who != uid]
        for ticket in silenced:
            self.uplink.leave(ticket)
        return len(silenced)

    def begin_upload(self, uid: str, parts: int) -> int:
        tickets = []
        for _ in range(parts):
            ticket = self.uplink.enter()  # leak: part_done pops a ticket of the upload and ignores it
            if ticket is None:
                break
            tickets.append(ticket)
        self.uploads.setdefault(uid, []).extend(tickets)
        return len(tickets)

    def part_done(self, uid: str) -> int:
        self.uploads[uid].pop()
        remaining = len(self.uploads[uid])
        if not remaining:
            del self.uploads[uid]
        return remaining

    def abort_upload(self, uid: str) -> None:
        for ticket in self.uploads.pop(uid, ()):
            self.uplink.leave(ticket)

    def begin_export(self, uid: str) -> bool:
        if uid in self.exports:
            return False
        ticket = self.uplink.enter()  # clean: near miss, export_done leaves with what it pops
        if ticket is None:
            return False
        self.exports[uid] = ticket
        return True

    def export_done(self, uid: str) -> None:
        match self.exports.pop(uid, None):
            case None:
                logger.warning("no export of %s", uid)
            case ticket:
                self.uplink.leave(ticket)
