"""Model families and the modules that Megatron's layers are assembled from."""
