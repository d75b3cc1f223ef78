"""Errors of approximate attention."""
