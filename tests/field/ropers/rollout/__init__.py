from .engine import RolloutEngine
from .kv import BlockManager
