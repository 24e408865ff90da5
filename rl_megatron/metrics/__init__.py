"""Watching a run: numbers, a few rollouts, times, a progress bar, a curve. Rank 0 writes."""
