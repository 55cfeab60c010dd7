"""Checking what a launch is given: geometry, memory, addresses, weights, mailboxes."""
