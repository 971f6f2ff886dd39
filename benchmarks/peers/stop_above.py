"""Run a command and stop it where it would take more memory than the machine may give: python stop_above.py GB -- COMMAND...

The kernel would stop it a little later, and might stop something else first.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def resident(process: int) -> int:
    """Bytes of a process that are in memory; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


def main() -> None:
    """Command line."""
    most, command = float(sys.argv[1]), sys.argv[3:]
    running = subprocess.Popen(command)
    while running.poll() is None:
        if resident(running.pid) > most * 1e9:
            running.kill()
            running.wait()
            sys.exit(f"stopped when it took more than {most:g} GB of memory")
        time.sleep(0.1)
    sys.exit(running.returncode)


if __name__ == "__main__":
    main()
