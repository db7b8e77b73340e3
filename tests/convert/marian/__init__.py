"""Models of Marian: two that Marian trained, with its translations, and a rebuild in numpy."""
