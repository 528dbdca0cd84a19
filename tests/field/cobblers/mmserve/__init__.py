from .buffers import FrameBuffers, FrameTicket
from .worker import PreprocessWorker
from .frontend import MultimodalFrontend, MMRequest
