"""The CUDA driver, devices and streams: everything that is asked of either."""
