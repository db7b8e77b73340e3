"""A trained model: its folder, translations, scores and pictures of attention."""
