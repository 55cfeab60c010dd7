"""Checking kernels against the fp64 reference: inputs, guarded memory, verdicts and reports; torch only."""
