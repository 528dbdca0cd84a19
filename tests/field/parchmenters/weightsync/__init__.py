"""Weight hand-over between a trainer and colocated samplers."""
from .ipc import HandleRegistry
from .sampler_side import SamplerLoader
from .staging import MeteredStaging, StagingPool
from .trainer_side import TrainerPush

__all__ = ["HandleRegistry", "MeteredStaging", "SamplerLoader", "StagingPool", "TrainerPush"]
