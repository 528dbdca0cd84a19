from .comm import CommBuffer, CommBufferPool
from .bucket import GradBucketer
from .moe import ExpertDispatcher
