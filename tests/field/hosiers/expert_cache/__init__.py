"""MoE expert offloading: experts live on the host and are paged into GPU frames."""
