"""Attention by operations of torch: all chunks at once, without waiting for a device, or pair by pair under a bias."""
