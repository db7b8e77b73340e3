"""The ladder: every block of every preset in both frameworks, from the embedding to the model."""
