"""What runs inside a sandbox. It sees nothing else of ours, and no package but Python's own."""
