from .decode import DecodeQueue
from .prefill import PrefillQueue
from .rooms import RoomTable, RowPool
