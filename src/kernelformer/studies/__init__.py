"""Figures and tables of the papers, a file each."""
