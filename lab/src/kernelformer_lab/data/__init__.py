"""Files, tokens, images and batches: what tasks read their samples from."""
