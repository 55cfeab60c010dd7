"""What can be asked for, as values and names: architectures, variants, images, parameters, batch tables."""
