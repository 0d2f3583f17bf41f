"""Runs a command for a twentieth of the time, stopped between: `python paced.py SECONDS COMMAND...`.

It imports nothing else, as it stays beside the command; and it is no shell script, as not every shell can stop groups.
The command is killed after so many seconds.
"""

import os
import signal
import subprocess
import sys
import time

RUNS, RESTS = 0.05, 0.95  # seconds

if __name__ == "__main__":
    end = time.monotonic() + float(sys.argv[1])
    process = subprocess.Popen(sys.argv[2:], close_fds=False, preexec_fn=os.setpgrp)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
    while process.poll() is None:
        time.sleep(RUNS)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(RESTS)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT if time.monotonic() < end else signal.SIGKILL)
    sys.exit(process.returncode)
