"""Algorithms for accelerators: all chunks at once, by few large operators, without a number that the host has to read."""
