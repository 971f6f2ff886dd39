"""The real Python bindings of TensorRT without its libraries: the nine entry points that they look for are empty functions.

Nothing can be built or run with them; names, arguments and enumerations are all there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

VERSION = "11.4.0.106"
PACKAGE = f"tensorrt_cu13_bindings=={VERSION}"
SOURCE = """
void *createInferBuilder_INTERNAL(void *l, int v) { return 0; }
void *createInferRefitter_INTERNAL(void *e, void *l, int v) { return 0; }
void *createInferRuntime_INTERNAL(void *l, int v) { return 0; }
void *createNvOnnxParser_INTERNAL(void *n, void *l, int v) { return 0; }
void *createNvOnnxParserRefitter_INTERNAL(void *r, void *l, int v) { return 0; }
void *getBuilderPluginRegistry(int c) { return 0; }
void *getPluginRegistry(void) { return 0; }
int getNvOnnxParserVersion(void) { return 0; }
int initLibNvInferPlugins(void *l, const char *n) { return 0; }
"""
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import make_api, tensorrt_bindings
print(json.dumps(make_api.describe(tensorrt_bindings)))
"""


class UnavailableError(Exception):
    """The bindings cannot be had here; the message says why."""


def describe(folder: Path) -> dict[str, Any]:
    """`make_api.describe` of the real bindings, downloaded into `folder`.

    Raises:
        UnavailableError: no network, no wheel for this Python, no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        raise UnavailableError("making the empty libraries takes Linux and a C compiler")
    tag = f"{sys.version_info.major}{sys.version_info.minor}"
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "--timeout", "5", "--retries", "0",
        "--python-version", f"{sys.version_info.major}.{sys.version_info.minor}", "--implementation", "cp", "--abi", f"cp{tag}",
        "--platform", "manylinux_2_28_x86_64", "--only-binary=:all:", "-d", str(folder), PACKAGE,
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        wheel = next(folder.glob("*.whl"))
    except (subprocess.SubprocessError, OSError, StopIteration) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise UnavailableError(f"{PACKAGE} cannot be downloaded: {lines[-1] if lines else error}") from error
    zipfile.ZipFile(wheel).extractall(folder)
    (folder / "stub.c").write_text(SOURCE)
    for name in ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser"):
        library = f"{name}.so.{VERSION.partition('.')[0]}"
        make = [compiler, "-shared", "-fPIC", "-o", library, "stub.c", f"-Wl,-soname,{library}"]
        subprocess.run(make, check=True, cwd=folder, timeout=60)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)}
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, here], capture_output=True, text=True, env=environment, timeout=120
    )
    if done.returncode:
        raise UnavailableError(f"the bindings cannot be imported: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
