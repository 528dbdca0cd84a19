from .client import RelayClient
from .leases import LeaseBook
from .server import RelayServer
