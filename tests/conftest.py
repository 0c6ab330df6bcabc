"""What every test process needs before torch may be loaded: few threads, and threads that sleep while they wait."""

import os

# Spinning or crowded OpenMP threads make a small step many times slower when anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
