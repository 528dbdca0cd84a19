"""A protocol of seat brokers, and one that counts seats by feature in memory."""
from typing import Optional, Protocol


class SeatBroker(Protocol):
    def book(self, feature: str) -> Optional[str]: ...

    def unbook(self, seat: str) -> None: ...


class LocalBroker:
    def __init__(self, seats: dict):
        self._free = {f: [f"{f}#{i}" for i in range(n)] for f, n in seats.items()}

    def book(self, feature: str) -> Optional[str]:
        line = self._free.get(feature)
        return line.pop() if line else None

    def unbook(self, seat: str) -> None:
        feature, _, _ = seat.partition("#")
        self._free[feature].append(seat)


class Simulator:
    def __init__(self, broker: SeatBroker, solver):
        self.broker = broker
        self.solver = solver

    def solve(self, mesh):
        seat = self.broker.book("solver")  # leak: a diverged run keeps the seat
        if seat is None:
            return None
        result = self.solver.run(mesh)
        if result.diverged:
            return None
        self.broker.unbook(seat)
        return result

    def check(self, mesh):
        seat = self.broker.book("lint")  # clean: unbooked in finally
        if seat is None:
            return ["no seat"]
        try:
            return self.solver.lint(mesh)
        finally:
            self.broker.unbook(seat)

    def reserve(self, feature):
        return self.broker.book(feature)  # clean: handed to the caller


def post(sim, frames, view):
    seat = sim.reserve("post")  # clean: unbooked after the loop
    if seat is None:
        return 0
    for frame in frames:
        view.draw(frame)
    sim.broker.unbook(seat)
    return len(frames)


def post_with_license_log(sim: Simulator, frames, view, log):
    seat = sim.reserve("post")  # leak: unbooked only when the view has drawn all
    drawn = sum(1 for frame in frames if view.draw(frame))
    log.append((seat, drawn))
    if seat and drawn == len(frames):
        sim.broker.unbook(seat)
