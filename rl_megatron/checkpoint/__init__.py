"""Model folders and checkpoints: what lies in them, how they are read, written and made durable."""
