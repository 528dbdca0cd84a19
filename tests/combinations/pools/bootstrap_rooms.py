# take: P.open_room(key)
# give: P.vacate_room(key)
# gets: answer
# type: BootstrapRooms
import enum


class RoomState(enum.Enum):
    IDLE = 0
    BOOTSTRAPPING = 1


class BootstrapRooms:
    """Prefill/decode handshake rooms. A request hashes to a start room and probes on."""

    def __init__(self, num_rooms):
        self.num_rooms = num_rooms
        self._state = [RoomState.IDLE] * num_rooms
        self._guest = {}

    def _probe(self, req):
        start = hash(req)
        for k in range(self.num_rooms):
            room = (start + k) % self.num_rooms
            if self._state[room] is RoomState.IDLE:
                return room
        return None

    def open_room(self, req):
        if req in self._guest:
            return False
        room = self._probe(req)
        if room is None:
            return False
        self._state[room] = RoomState.BOOTSTRAPPING
        self._guest[req] = room
        return True

    def vacate_room(self, req):
        room = self._guest.pop(req)
        self._state[room] = RoomState.IDLE
