"""Kernels, each behind one door: a function of tensors that picks an implementation."""
