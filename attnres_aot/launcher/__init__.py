"""The shared-object form of bundles: a launcher in C++, what is embedded in it, and how it is compiled and proven."""
