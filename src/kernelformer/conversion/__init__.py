"""Distillation of converted models: losses, training, and their distance from the original."""
