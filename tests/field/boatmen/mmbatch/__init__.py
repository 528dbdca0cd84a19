from .pipeline import Pipeline
from .config import MMConfig
