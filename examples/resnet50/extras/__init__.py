"""What the trainer does without: each module is imported only if an option asks for it."""
