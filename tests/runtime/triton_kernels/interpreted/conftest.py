"""These files run in a process of their own with TRITON_INTERPRET=1; see ../test_interpreted.py."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.exit("interpreted tests run through tests/runtime/triton_kernels/test_interpreted.py")

from runtime.kernels.triton.interpreter import repair

repair()
