"""Algorithms for accelerators and exported graphs: all chunks at once, by few large operators."""
