"""A parameter server client for sparse embeddings: connections, a request window, and the client."""
