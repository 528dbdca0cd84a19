from .handler import Handler
from .permits import Gate, Refused
from .sessions import SessionTable
from .upstream import Endpoint, Upstreams, NoRoute
