"""The plan: from a configuration as values to the variants and images that it needs. Pure."""
