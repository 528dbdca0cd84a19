"""Per tenant concurrency limits of the API gateway."""
