"""One vector for each text: an encoder, and what sentence-transformers does behind it."""
