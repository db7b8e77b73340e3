"""The mathematics of training: the objective, the optimizer, one pure step and its cost."""
