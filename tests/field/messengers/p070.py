"""Meeting rooms with a waiting list; a freed room goes to the next waiter."""
import heapq


class Rooms:
    def __init__(self, names):
        self._empty = sorted(names)

    def book(self):
        return self._empty.pop(0) if self._empty else None

    def unbook(self, room):
        heapq.heappush(self._empty, room)


class FrontDesk:
    def __init__(self, rooms):
        self.rooms = rooms
        self.waiting = []
        self.occupied = {}
        self.turned_away = 0

    def offer(self, room, party_size):
        """Seats the first waiter that fits, else unbooks the room."""
        for i, (name, size) in enumerate(self.waiting):
            if size <= party_size and name not in self.occupied:
                del self.waiting[i]
                self.occupied[name] = room
                return name
        self.rooms.unbook(room)
        return None

    def seat(self, name, room):
        """Seats a guest once; tells whether the room is now in use."""
        if name in self.occupied:
            return False
        self.occupied[name] = room
        return True

    def check_in(self, name, size):
        room = self.rooms.book()  # clean: seated or unbooked
        if room is None:
            self.waiting.append((name, size))
            return False
        if self.seat(name, room):
            return True
        self.rooms.unbook(room)
        return False

    def check_in_vip(self, name):
        room = self.rooms.book()  # leak: a guest who has a room already is not seated again
        if room is None:
            self.turned_away += 1
            return None
        self.seat(name, room)
        return self.occupied[name]

    def check_out(self, name, size):
        room = self.occupied.pop(name, None)
        if room is not None:
            self.offer(room, size)

    def open_up(self, size):
        room = self.rooms.book()  # clean: offer seats or unbooks in any case
        return self.offer(room, size) if room is not None else None

    def open_for(self, size):
        room = self.rooms.book()  # leak: nobody waits, so it is not offered
        if room is None:
            return None
        if not self.waiting:
            return None
        return self.offer(room, size)

    def ventilate(self, minutes):
        room = self.rooms.book()  # clean: unbooked
        if room is None:
            return 0
        self.rooms.unbook(room)
        return minutes
