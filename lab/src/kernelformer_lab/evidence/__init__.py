"""What the papers claim, and what this library gets: items, the queue that measures them, verdicts and their page."""
