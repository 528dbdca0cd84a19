"""Seats of judge models. A panel sits for one comparison."""
import collections
import itertools
import threading


class NoQuorum(Exception):
    pass


class SeatMap:
    def __init__(self, seats_per_model):
        self._free = {m: collections.deque(f"{m}#{i}" for i in range(n)) for m, n in seats_per_model.items()}
        self._lock = threading.Lock()

    def sit(self, model):
        with self._lock:
            q = self._free[model]
            if not q:
                return None
            return q.popleft()  # clean: returned to the caller

    def sit_any(self, exclude=()):
        with self._lock:
            for model, q in self._free.items():
                if q and model not in exclude:
                    return q.popleft()  # clean: returned to the caller
        return None

    def stand(self, seat):
        model = seat.partition("#")[0]
        with self._lock:
            self._free[model].append(seat)


class Panel:
    _ids = itertools.count()

    def __init__(self, seats, chairs):
        self.panel_id = next(self._ids)
        self._map = seats
        self.chairs = chairs
        self.foreman = None

    @classmethod
    def convene(cls, seats, models, quorum):
        chairs = []
        for m in models:
            s = seats.sit(m)  # leak: NoQuorum is raised below while the seats that were found are held
            if s is not None:
                chairs.append(s)
        if len(chairs) < quorum:
            raise NoQuorum(f"{len(chairs)} of {quorum}")
        return cls(seats, chairs)

    @classmethod
    def convene_or_none(cls, seats, models, quorum):
        chairs = []
        for m in models:
            s = seats.sit(m)  # clean: near miss, without a quorum all stand up, else the panel owns them
            if s is not None:
                chairs.append(s)
        if len(chairs) < quorum:
            for s in chairs:
                seats.stand(s)
            return None
        return cls(seats, chairs)

    def elect_foreman(self):
        """Breaks ties; a model that does not sit in the panel yet."""
        if self.foreman is None:
            self.foreman = self._map.sit_any(exclude={c.partition("#")[0] for c in self.chairs})  # leak: dissolve() lets the chairs stand up but forgets the foreman
        return self.foreman is not None

    def substitute(self, chair):
        fresh = self._map.sit_any()  # clean: near miss, takes the place of the chair, which stands up; dissolve() does the rest
        if fresh is None:
            return False
        self.chairs[self.chairs.index(chair)] = fresh
        self._map.stand(chair)
        return True

    def dissolve(self):
        chairs, self.chairs = self.chairs, []
        for c in chairs:
            self._map.stand(c)
