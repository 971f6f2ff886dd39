"""These files run in a process of their own with TRITON_INTERPRET=1; see ../test_interpreted.py. Their names keep pytest from
collecting them otherwise.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton_interpreter import repair, watch

    repair()
    watch()
