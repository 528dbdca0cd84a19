from .layer import MoELayer  # noqa: F401
