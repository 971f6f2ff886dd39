"""Process of one part of one section, started by `benchmarks/gpu.py`: a fault of the device or a lack of memory ends it alone."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
HERE = Path(__file__).resolve().parent
sys.path[0:1] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[1] / "tests" / "helpers")]


def main() -> int:
    """Exit code 0: done; `MISSING`: a peer is missing; 1: failed. `--result` says more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("part", choices=["check", "timing"])
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--gpt-fast", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()

    import importlib
    import math
    from contextlib import nullcontext

    import torch

    from gpu_sections import MISSING
    from gpu_sections.bench import Bench, MissingPeerError, said
    from runtime.kernels import tuning

    bench = Bench(options.dry_run, options.seconds, options.result, options.work, options.gpt_fast)
    try:
        if options.dry_run:
            from triton_interpreter import repair

            repair()
        torch.manual_seed(0)
        # As after `compress tune`; checks try every candidate on some shapes, and odd ones are not worth tuning.
        with tuning.measuring(math.inf) if options.part == "timing" else nullcontext():
            getattr(importlib.import_module(options.module), options.part)(bench)
    except MissingPeerError as missing:
        bench.fact(reason=str(missing))
        return MISSING
    except Exception as error:
        bench.fact(reason=said(error))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
