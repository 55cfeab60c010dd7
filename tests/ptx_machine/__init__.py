"""A machine that executes the PTX of compiled images on the CPU: what a GPU would be told, without a GPU."""
