"""Request router in front of a fleet of inference workers."""
from .proxy import Proxy
from .workers import Worker, WorkerRegistry
