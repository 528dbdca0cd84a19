import asyncio
from typing import NamedTuple


class Room(NamedTuple):
    code: str
    port: int
    voice: int


class ServerPorts:
    def __init__(self, first, count):
        self.ports = list(range(first, first + count))

    def open_port(self):
        return self.ports.pop(0)

    def close_port(self, port):
        self.ports.append(port)


class Matchmaker:
    def __init__(self, ports):
        self.ports = ports
        self.rooms = {}
        self.players = {}
        self.lobby = None
        self.changed = asyncio.Event()

    def create(self, code):
        if code in self.rooms:
            return self.rooms[code]
        port = self.ports.open_port()  # clean: both ways out of rooms close the game port
        voice = self.ports.open_port()  # leak: merge closes the game port of the smaller room only
        self.rooms[code] = Room(code, port, voice)
        self.players[code] = []
        self.changed.set()
        return self.rooms[code]

    def join(self, code, player):
        self.players[code].append(player)
        return len(self.players[code])

    def merge(self, small, large):
        room = self.rooms.pop(small)
        self.players[large] += self.players.pop(small)
        self.ports.close_port(room.port)
        return len(self.players[large])

    def destroy(self, code):
        room = self.rooms.pop(code, None)
        if room is None:
            return
        self.players.pop(code)
        self.ports.close_port(room.port)
        self.ports.close_port(room.voice)

    async def open_lobby(self):
        if self.lobby is None:
            self.lobby = self.ports.open_port()  # clean: close_lobby closes it
        await self.changed.wait()
        self.changed.clear()
        return self.lobby

    def close_lobby(self):
        if self.lobby is not None:
            self.ports.close_port(self.lobby)
            self.lobby = None


class Replay:
    def __init__(self, ports):
        self.ports = ports
        self.streams = {}

    def start(self, match):
        self.streams[match] = self.ports.open_port()  # leak: start of the same match overwrites the port

    def speed(self, match, factor):
        return self.streams[match], factor * 60

    def stop(self, match):
        port = self.streams.pop(match, None)
        if port is not None:
            self.ports.close_port(port)
