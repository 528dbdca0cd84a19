"""What is asked of the process that holds torch."""

import msgspec


class Job(msgspec.Struct, frozen=True):
    """A request for plans, or for results (`request`, `answers`: files), a run of pytest (`arguments`), or a
    question."""

    said: str  # the file that takes standard output and error
    limit: float  # seconds until it is killed
    request: str = ""
    answers: str = ""
    replays: bool = False  # whether the request is for results
    arguments: tuple[str, ...] = ()
    device: str = ""
    asks_for_cuda: bool = False  # nothing but whether there is a device: status 0 or 1
