"""Attack the library: hostile files, settings, texts, calls and kills, and what became of each."""
