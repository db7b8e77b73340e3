"""A judge of translations, for a run and for the command: exact match, BLEU, chrF, MetricX."""
