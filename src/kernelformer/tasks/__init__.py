"""Data sets and their metrics, one file a task."""
