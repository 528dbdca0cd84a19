from .kvpool import KVPool, Lease
from .request import Request, RequestState
from .scheduler import Scheduler
