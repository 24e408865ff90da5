"""Processes, groups and layouts: how a job is spread over ranks."""
