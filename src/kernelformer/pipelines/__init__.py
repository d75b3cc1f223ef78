"""Whole jobs, as the command line and other programs call them."""
