"""What every unit test relies on, wherever pytest was started."""

import os
import signal

# A background job of a shell without job control ignores SIGINT, and so do its children: none could be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run in as many processes as there are cores; torch would start as many threads again in each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
