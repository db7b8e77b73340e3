"""From sounds to features: samples of files and arrays, and their log-mel bands."""
