"""From text to batches: read parallel lines, split them into token ids, pad them into shapes."""
