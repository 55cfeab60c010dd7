"""Device code: the only modules, beside `attnres_aot.compiler`, that import the CuTe DSL."""
