"""Use of a trained model: its folder, translations, their scores, and pictures of attention."""
