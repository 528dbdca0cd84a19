from .api import LongContextService
from .kv import KVManager, KVSpan
from .request import GenRequest
from .scheduler import ChunkScheduler, FifoScheduler, ParkingLot
