"""Measurements of time and memory; each file is a command."""
