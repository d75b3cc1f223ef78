"""Claims of the papers against measurements: items, the queue that measures them, verdicts and their page."""
