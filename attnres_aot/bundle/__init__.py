"""Bundle folders: their manifest, reading, checking and writing them."""
