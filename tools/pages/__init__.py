"""Tables and pictures of this repository's README, docs and results, made from the records."""
