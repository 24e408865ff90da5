"""From rows on disk to token ids: reading, chat templates, lengths, order, packing."""
