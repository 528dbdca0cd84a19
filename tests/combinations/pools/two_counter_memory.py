# take: P.book_bytes(n)
# give: P.unbook_bytes(X)
# gets: optional
# type: SpillAccountant
from enum import Enum
from typing import NamedTuple, Optional


class Tier(Enum):
    GPU = "gpu"
    HOST = "host"


class Booking(NamedTuple):
    tier: Tier
    nbytes: int


class SpillAccountant:
    """Books bytes on the GPU as long as that works, else on the host, else nowhere."""

    def __init__(self, gpu_bytes: int, host_bytes: int):
        self.gpu_left = gpu_bytes
        self.host_left = host_bytes

    def book_bytes(self, nbytes: int) -> Optional[Booking]:
        if nbytes <= self.gpu_left:
            self.gpu_left -= nbytes
            return Booking(Tier.GPU, nbytes)
        if nbytes <= self.host_left:
            self.host_left -= nbytes
            return Booking(Tier.HOST, nbytes)
        return None

    def unbook_bytes(self, booking: Booking) -> None:
        if booking.tier is Tier.GPU:
            self.gpu_left += booking.nbytes
        else:
            self.host_left += booking.nbytes
