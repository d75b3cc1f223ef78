"""Measurements of speed and memory: attention against its peers, whole encoders, and models over the length."""
