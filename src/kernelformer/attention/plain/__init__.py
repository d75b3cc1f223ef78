"""Attention by operations of torch: all chunks at once, or pair by pair under a bias."""
