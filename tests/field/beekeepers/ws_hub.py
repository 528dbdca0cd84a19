"""WebSocket hub: client slots, topic subscriptions, presence references and ports of the media relay."""
from __future__ import annotations

import asyncio
import json
import logging
import secrets
from dataclasses import dataclass, field
from typing import Optional

log = logging.getLogger("hub")


class SlotTable:
    """Client slots with a generation, as the wire protocol wants them."""

    def __init__(self, size: int) -> None:
        self._rows: list[Optional[str]] = [None] * size
        self._generation = 0

    def register(self, owner: str) -> Optional[int]:
        for index, row in enumerate(self._rows):
            if row is None:
                self._rows[index] = owner
                self._generation += 1
                return index
        return None

    def unregister(self, index: int) -> None:
        self._rows[index] = None

    def owner(self, index: int) -> Optional[str]:
        return self._rows[index]


class PortRange:
    """UDP ports for relayed media, given in pairs (rtp, rtcp)."""

    def __init__(self, low: int, high: int) -> None:
        self._free = list(range(low, high, 2))

    def allocate_pair(self) -> tuple[int, int]:
        rtp = self._free.pop()
        return rtp, rtp + 1

    def any_left(self) -> bool:
        return bool(self._free)

    def release_pair(self, pair: tuple[int, int]) -> None:
        self._free.append(pair[0])


class Presence:
    """Reference count per user: online while at least one connection holds it."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def retain(self, user: str) -> int:
        self._count[user] = self._count.get(user, 0) + 1
        return self._count[user]

    def let_go(self, user: str) -> None:
        self._count[user] -= 1
        if not self._count[user]:
            del self._count[user]


@dataclass
class Client:
    user: str
    socket: object
    slot: int
    token: str
    call: Optional[tuple[int, int]] = None
    topics: set[str] = field(default_factory=set)


class Hub:
    def __init__(self, slots: SlotTable, ports: PortRange, presence: Presence) -> None:
        self.slots = slots
        self.ports = ports
        self.presence = presence
        self.clients: dict[int, Client] = {}
        self.guests: dict[str, int] = {}
        self.banned: set[str] = set()

    async def connect(self, user: str, socket) -> Optional[Client]:
        slot = self.slots.register(user)  # leak: a banned user is turned away with the slot registered
        if slot is None:
            await socket.close(1013)
            return None
        if user in self.banned:
            await socket.close(4003)
            return None
        self.presence.retain(user)  # clean: disconnect() lets go
        client = Client(user, socket, slot, secrets.token_hex(8))
        self.clients[slot] = client
        return client

    async def disconnect(self, client: Client) -> None:
        self.clients.pop(client.slot, None)
        self.slots.unregister(client.slot)
        self.presence.let_go(client.user)
        if client.call is not None:
            self.ports.release_pair(client.call)
            client.call = None
        await client.socket.close(1000)

    def start_call(self, client: Client) -> bool:
        if client.call is not None:
            return False
        if not self.ports.any_left():
            return False
        client.call = self.ports.allocate_pair()  # clean: near miss, hang_up() or disconnect() releases it
        return True

    def hang_up(self, client: Client) -> None:
        pair, client.call = client.call, None
        if pair is not None:
            self.ports.release_pair(pair)

    async def serve(self, user: str, socket) -> int:
        client = await self.connect(user, socket)  # clean: disconnected in the finally
        if client is None:
            return 0
        handled = 0
        try:
            async for text in socket:
                message = json.loads(text)
                if message["op"] == "quit":
                    return handled
                if message["op"] == "call":
                    self.start_call(client)  # clean: near miss, disconnect releases a call in progress
                elif message["op"] == "hangup":
                    self.hang_up(client)
                handled += 1
        finally:
            await self.disconnect(client)
        return handled

    async def handshake(self, user: str, socket) -> bool:
        client = await self.connect(user, socket)  # leak: a wrong token returns False without disconnect
        if client is None:
            return False
        await socket.send(client.token)
        if await socket.recv() != client.token[::-1]:
            log.info("handshake of %s failed", user)
            return False
        await self.disconnect(client)
        return True

    def admit_guest(self, name: str) -> bool:
        slot = self.slots.register("guest:" + name)  # leak: dismiss_guest() forgets the slot number
        if slot is None:
            return False
        self.guests[name] = slot
        return True

    def dismiss_guest(self, name: str) -> bool:
        return self.guests.pop(name, None) is not None


class ConferenceBridge:
    """One port pair per participant, plus one for the mix."""

    def __init__(self, ports: PortRange) -> None:
        self.ports = ports
        self.mix = ports.allocate_pair()  # leak: shutdown() releases the legs and not the mix
        self.legs: dict[str, tuple[int, int]] = {}

    def join(self, who: str) -> bool:
        if who in self.legs or not self.ports.any_left():
            return False
        self.legs[who] = self.ports.allocate_pair()  # clean: near miss, leave() and shutdown() release it
        return True

    def leave(self, who: str) -> None:
        pair = self.legs.pop(who, None)
        if pair is not None:
            self.ports.release_pair(pair)

    def shutdown(self) -> None:
        for pair in self.legs.values():
            self.ports.release_pair(pair)
        self.legs.clear()
        self.mix = (0, 0)


class Recorder:
    def __init__(self, ports: PortRange, sink) -> None:
        self.ports = ports
        self.sink = sink
        self.pair: Optional[tuple[int, int]] = None

    def start(self, destination: str) -> tuple[int, int]:
        if self.pair is not None:
            self.ports.release_pair(self.pair)
        self.pair = self.ports.allocate_pair()  # clean: near miss, a restart releases the old one first
        self.sink.open(destination)
        return self.pair

    def stop(self) -> None:
        self.sink.close()
        if self.pair is not None:
            self.ports.release_pair(self.pair)
            self.pair = None


async def echo_test(ports: PortRange, transport, rounds: int) -> float:
    pair = ports.allocate_pair()  # clean: released in the finally
    try:
        times = [await transport.round_trip(pair[0]) for _ in range(rounds)]
        return sum(times) / len(times)
    finally:
        ports.release_pair(pair)


async def pick_clean_pair(ports: PortRange, transport) -> Optional[tuple[int, int]]:
    """A pair on which nothing answers."""
    while ports.any_left():
        pair = ports.allocate_pair()  # leak: a noisy pair is replaced by the next without release
        if not await transport.heard(pair[0]):
            return pair
        log.debug("port %d is in use by a stranger", pair[0])
    return None


async def watch(presence: Presence, users: list[str], seconds: float) -> list[str]:
    for user in users:
        presence.retain(user)  # clean: near miss, the second loop lets go of the same list
    await asyncio.sleep(seconds)
    for user in users:
        presence.let_go(user)
    return users


async def impersonate(presence: Presence, admin: str, target: str, action) -> bool:
    presence.retain(target)  # leak: the refused action returns online for ever
    if not await action.allowed(admin, target):
        return False
    await action.run(target)
    presence.let_go(target)
    return True


def whisper(hub: Hub, sender: str, to: str, text: str) -> Optional[int]:
    slot = hub.slots.register(sender)  # clean: unregistered on each way that got one
    if slot is None:
        return None
    receivers = [c for c in hub.clients.values() if c.user == to]
    if not receivers:
        hub.slots.unregister(slot)
        return 0
    for client in receivers:
        asyncio.ensure_future(client.socket.send(text))
    hub.slots.unregister(slot)
    return len(receivers)
