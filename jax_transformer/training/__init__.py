"""Training: the objective, the optimizer, one pure step, checkpoints and the loop around them."""
