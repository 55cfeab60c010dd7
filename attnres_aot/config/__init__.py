"""Configuration files: reading YAML with every mistake of a file reported at once, and those that ship."""
