from .pages import PageAllocator, PageRun
from .request import Request, Status
from .scheduler import Scheduler
