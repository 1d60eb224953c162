"""Small Python tasks on stdin and stdout (stub while the words are tried)."""
