"""From text to batches: read parallel text, encode it as token ids, build padded batches."""
