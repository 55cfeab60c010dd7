"""What every unit test relies on, wherever pytest was started."""

import signal

# A background job of a shell without job control ignores SIGINT, and so do its children: none could be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)
