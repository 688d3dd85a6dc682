"""An import of the configuration loads no torch, prints nothing and starts nothing."""

import sys
from pathlib import Path

from tests.waits import ran

ROOT = Path(__file__).resolve().parents[3]


def run(code):
    return ran([sys.executable, "-c", code], cwd=ROOT)


def test_import_and_load_need_no_torch():
    done = run(
        "import sys, threading\n"
        "from deepspeed_c.config import load_config\n"
        "load_config({'train_batch_size': 1, 'optimizer': {'type': 'AdamW'}}, world_size=1)\n"
        "heavy = {'torch', 'numpy', 'deepspeed_c._C'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert threading.active_count() == 1\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_unknown_optimizer_without_torch_is_an_error_and_not_a_crash():
    done = run(
        "import sys; sys.modules['torch'] = None\n"
        "from deepspeed_c.config import problems_of\n"
        "print(problems_of({'optimizer': {'type': 'Brandnew'}}, batch='skip')[0])\n"
    )
    assert done.returncode == 0, done.stderr
    assert '"Brandnew" is not known' in done.stdout
