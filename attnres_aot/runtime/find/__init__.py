"""Finding the bundle that serves a device."""
