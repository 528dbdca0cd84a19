from .app import App

__all__ = ["App"]
