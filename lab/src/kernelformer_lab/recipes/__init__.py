"""Complete runs by name."""
