"""Before any test: the repository on the path, and one quiet thread."""
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")              # before torch: idle threads that spin slow all others
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """A folder of tests goes to two processes, file by file, where pytest-xdist is installed and nobody said -n."""
    option = config.option
    if "PYTEST_XDIST_WORKER" in os.environ:                   # this is one of the two
        return
    if getattr(option, "numprocesses", 0) is None and not option.usepdb and any(Path(arg).is_dir() for arg in config.args):
        option.numprocesses, option.dist = 2, "loadfile"
