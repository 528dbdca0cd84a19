"""Thumbnail service for uploaded pictures and clips."""
