"""How graphs of torch's compilers hold and launch prepared objects."""
