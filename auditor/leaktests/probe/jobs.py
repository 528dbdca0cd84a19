"""What is asked of the process that holds torch."""

import msgspec


class Job(msgspec.Struct, frozen=True):
    """Either a request for plans (`request`, `answers`: files) or a run of pytest (`arguments`)."""

    said: str  # the file that takes standard output and error
    limit: float  # seconds until it is killed
    request: str = ""
    answers: str = ""
    arguments: tuple[str, ...] = ()
