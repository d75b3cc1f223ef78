"""HTML pages and pictures of what was measured."""
