"""Attention with a relative position bias."""
