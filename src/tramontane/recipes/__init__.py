"""The paper's two recipes, from a checkpoint to a table that compares their results."""
