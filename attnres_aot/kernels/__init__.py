"""Device code: the only modules, beside `attnres_aot.kernels.compile`, that import the CuTe DSL."""
