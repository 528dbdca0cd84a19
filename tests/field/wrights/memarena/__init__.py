from .arena import Arena, Chunk
from .tensors import PooledTensor, TensorPool
from .workspace import Workspace

__all__ = ["Arena", "Chunk", "PooledTensor", "TensorPool", "Workspace"]
