"""Use of a trained model: its folder, translations, and pictures of attention."""
