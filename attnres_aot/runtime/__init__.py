"""The deployment loader: finds a bundle, loads its code through the driver and launches it. Needs torch alone."""
