"""What turns a configuration into a running job."""
