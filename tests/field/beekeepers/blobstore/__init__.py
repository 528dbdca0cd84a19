"""Upload front end of the blob store."""
