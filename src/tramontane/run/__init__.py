"""One training run: its session, folder, checkpoints, display and report."""
