"""Nouns and verbs that every layer shares. Nothing here computes."""
