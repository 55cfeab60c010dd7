"""Launching: from checked operands to one driver call."""
