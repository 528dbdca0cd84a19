"""HTTP gateway in front of several inference servers."""
from .app import Gateway
from .client import Client, Response
from .leases import Balancer, UpstreamPool

__all__ = ["Balancer", "Client", "Gateway", "Response", "UpstreamPool"]
