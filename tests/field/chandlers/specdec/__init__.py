from .worker import SpecWorker  # noqa: F401
