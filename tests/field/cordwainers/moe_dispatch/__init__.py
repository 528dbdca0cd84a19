"""Expert dispatch: token buffers, asynchronous exchanges, and the layer that uses both."""
