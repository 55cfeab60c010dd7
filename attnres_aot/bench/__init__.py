"""Measuring kernels and launches on a GPU: the commands `bench` and `tune`; standard library and torch only."""
