"""Whether bundles can be launched on this machine, and how to fix it if not."""
