"""LoRA adapter seats in the stacked weight tensors."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional


@dataclass
class Seat:
    index: int
    taken: bool = False
    adapter: Optional[str] = None


class SeatMap:
    """Seats as records with a taken flag."""

    def __init__(self, count: int) -> None:
        self.seats = [Seat(i) for i in range(count)]

    def claim_seat(self, adapter: str) -> Optional[Seat]:
        for seat in self.seats:
            if not seat.taken:
                seat.taken = True
                seat.adapter = adapter
                return seat
        return None

    def clear_seat(self, seat: Seat) -> None:
        seat.taken = False
        seat.adapter = None


@dataclass
class LoraRequest:
    adapter: str
    seat: Optional[Seat] = None
    owns_seat: bool = False


@dataclass
class AdapterWeights:
    rank: int
    path: str


class AdapterManager:
    """Loads adapters into seats and shares seats between requests."""

    def __init__(self, seats: SeatMap, fetch: Callable[[str], AdapterWeights], max_rank: int) -> None:
        self.seats = seats
        self.fetch = fetch
        self.max_rank = max_rank
        self.resident: dict[str, Seat] = {}
        self.pinned: dict[str, Seat] = {}

    def load(self, adapter: str) -> Optional[Seat]:
        if adapter in self.resident:
            return self.resident[adapter]
        seat = self.seats.claim_seat(adapter)  # leak: too high a rank returns with the seat still taken
        if seat is None:
            return None
        weights = self.fetch(adapter)
        if weights.rank > self.max_rank:
            return None
        self.resident[adapter] = seat
        return seat

    def load_checked(self, adapter: str) -> Optional[Seat]:
        if adapter in self.resident:
            return self.resident[adapter]
        seat = self.seats.claim_seat(adapter)  # clean: near miss, both failures clear the seat
        if seat is None:
            return None
        try:
            weights = self.fetch(adapter)
        except FileNotFoundError:
            self.seats.clear_seat(seat)
            return None
        if weights.rank > self.max_rank:
            self.seats.clear_seat(seat)
            return None
        self.resident[adapter] = seat
        return seat

    def unload(self, adapter: str) -> None:
        seat = self.resident.pop(adapter, None)
        if seat is not None:
            self.seats.clear_seat(seat)

    def pin(self, adapter: str) -> bool:
        """Runs each time a tenant is marked hot."""
        seat = self.seats.claim_seat(adapter)  # leak: pinning an adapter twice overwrites its first seat
        if seat is None:
            return False
        self.pinned[adapter] = seat
        return True

    def unpin(self, adapter: str) -> None:
        seat = self.pinned.pop(adapter, None)
        if seat is not None:
            self.seats.clear_seat(seat)

    def attach(self, request: LoraRequest) -> bool:
        shared = self.resident.get(request.adapter)
        if shared is not None:
            request.seat = shared
            return True
        request.seat = self.seats.claim_seat(request.adapter)  # clean: near miss, owns_seat makes detach clear it
        request.owns_seat = request.seat is not None
        return request.owns_seat

    def attach_private(self, request: LoraRequest) -> bool:
        request.seat = self.seats.claim_seat(request.adapter)  # leak: owns_seat stays false, so detach skips clearing
        return request.seat is not None

    def detach(self, request: LoraRequest) -> None:
        if request.owns_seat:
            self.seats.clear_seat(request.seat)
            request.owns_seat = False
        request.seat = None

    def preload(self, adapters: list[str]) -> list[str]:
        loaded = []
        for adapter in adapters:
            if adapter in self.resident:
                continue
            seat = self.seats.claim_seat(adapter)  # clean: near miss, leaves the loop only when seatless
            if seat is None:
                break
            self.resident[adapter] = seat
            loaded.append(adapter)
        return loaded

    def benchmark(self, adapter: str, run: Callable[[int], float]) -> float:
        seat = self.seats.claim_seat(adapter)  # leak: a handled timeout returns infinity without clearing
        if seat is None:
            return float("inf")
        try:
            elapsed = run(seat.index)
        except TimeoutError:
            return float("inf")
        self.seats.clear_seat(seat)
        return elapsed

    def dry_run(self, adapter: str, run: Callable[[int], float]) -> float:
        seat = self.seats.claim_seat(adapter)  # clean: near miss, handler falls through to the clearing
        if seat is None:
            return 0.0
        elapsed = 0.0
        try:
            elapsed = run(seat.index)
        except TimeoutError:
            elapsed = float("inf")
        self.seats.clear_seat(seat)
        return elapsed
