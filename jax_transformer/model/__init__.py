"""The model: pure functions, the blocks that call them, and the whole encoder-decoder."""
