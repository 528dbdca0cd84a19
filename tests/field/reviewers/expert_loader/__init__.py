"""MoE experts which are kept on the host and brought to device frames on demand."""
