from .exchange import Exchange
from .layer import ExpertLayer
