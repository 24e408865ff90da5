"""The runs: one folder per algorithm; train.py is the algorithm, the YAMLs are its settings."""
