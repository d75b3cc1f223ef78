"""Algorithms for accelerators: all chunks at once, by few large operators; the host reads no number."""
