from .store import CheckpointStore  # noqa: F401
