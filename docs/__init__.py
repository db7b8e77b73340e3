"""The pages of the site, and the programs that build it: python -m docs.build."""
