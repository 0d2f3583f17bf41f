"""How the command `hsdraft` starts, and how it ends at Ctrl-C, in processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hf_hsdraft

pytestmark = pytest.mark.process
ROOT = Path(hf_hsdraft.__file__).parents[1]
LIGHT = """
import sys
sys.argv = ["hsdraft", *{options}]
from hf_hsdraft.cli.main import main
try:
    main()
finally:
    print("heavy:", [name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1", **more}


def run(code: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, **options)


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ([], 2, "Commands:"),
        (["-h"], 0, "Commands:"),
        (["--version"], 0, hf_hsdraft.__version__),
        (["hub"], 2, "Commands:"),
        (["train", "--help"], 0, "--learning-rate"),
        (["demo", "-h"], 0, "--max-new-tokens"),
        (["hub", "card", "-h"], 0, "--bench"),
        (["make", "plan", "-h"], 0, "--measure"),
        (["demo", "--max-new-tokens", "few"], 2, "--max-new-tokens"),
        (["bench", "--limit", "0"], 2, "--limit"),
        (["serve", "--prot", "1"], 2, "--port"),
        (["chatt"], 2, "chat"),
        (["hub", "lst"], 2, "list"),
        (["data", "overlap", "--train", "./missing"], 2, "./missing"),
        (["try", "./missing"], 2, "there is no folder or file"),
        (["find", "/no/where"], 2, "there is no folder or file /no/where"),
        (["find", str(ROOT)], 2, "holds no model"),
        (["info", "./missing"], 2, "there is no folder or file"),
        (["bench", "--drafter", "ngrams", "--drafter", "./missing"], 2, "there is no folder or file"),
        (["train", "--target", "./missing", "--out", "x"], 2, "there is no folder or file"),
        (["history", "list", str(ROOT)], 2, "holds no past texts"),
        (["train", "--hlep"], 2, "No such option: --hlep. Did you mean --help?"),
        (["train", "--learning-rat", "1", "--out", "x"], 2, "--learning-rat. Did you mean --learning-rate?"),
        (["train", "--no-such=1", "--bf16"], 2, "No such option: --no-such"),
        (["train", "--bf16", "--no-tf32", "--depth_decay", "1", "--lr-scheduler-type=linear"], 2, "'--out'"),
    ],
)
def test_help_and_wrong_options_load_nothing_heavy(options, status, said):
    done = run(LIGHT.format(options=options))
    assert done.returncode == status and said in done.stdout + done.stderr, done.stderr
    assert "heavy: []" in done.stdout and "Traceback" not in done.stderr


INTERRUPTED = """
import builtins, os, signal, sys
sys.argv = ["hsdraft", "demo", "--target", "missing"]
original = builtins.__import__
def interrupting(name, *args, **kwargs):
    if name == {name!r}:
        builtins.__import__ = original
        os.kill(os.getpid(), signal.SIGINT)
    return original(name, *args, **kwargs)
builtins.__import__ = interrupting
from hf_hsdraft.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "name", ["core.methods", "typer", "rich.console", "transformers", "torch.nn", "runtime.target_loading"]
)
def test_an_interrupt_while_modules_are_imported_ends_in_a_line(name):
    """Of the package, of the parser, of PyTorch and transformers, and of what a command imports itself."""
    done = run(INTERRUPTED.format(name=name))
    assert done.returncode == 130 and done.stderr.endswith("stopped\n")
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_command_says_what_it_does_at_once_and_ends_at_ctrl_c(tmp_path):
    """Its body waits for what is written into a pipe."""
    pipe = tmp_path / "chats.jsonl"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "hf_hsdraft.cli", "data", "overlap", "--train", pipe, "--prompts", pipe]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stderr is not None and process.stderr.readline() == "loading PyTorch and transformers\n"
    while process.poll() is None:
        try:
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            time.sleep(0.1)
        else:
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.splitlines()[-1] == "stopped" and "Traceback" not in said


def test_processes_of_a_command_draft(tmp_path):
    """They copy its `sys.argv`, and must not wait for options to be parsed."""
    (tmp_path / "hsdraft").write_text(
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    import hf_hsdraft.bench.calls\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(eval, (\"__import__('hf_hsdraft') and 'torch' in __import__('sys').modules\",)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "hsdraft")], capture_output=True, text=True, env=environment(), timeout=120
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("layout", ["copy", "link"])
def test_a_script_beside_a_checkout_imports_the_package(tmp_path, layout):
    """A folder named hf_hsdraft beside a script is where Python looks first."""
    checkout = tmp_path / "hf_hsdraft"
    if layout == "link":
        checkout.symlink_to(ROOT)
    else:
        checkout.mkdir()
        shutil.copy(ROOT / "__init__.py", checkout)
        (checkout / "hf_hsdraft").symlink_to(ROOT / "hf_hsdraft")
    (tmp_path / "script.py").write_text(
        "import pickle\n"
        "import hf_hsdraft\n"
        "from hf_hsdraft import CachebackDrafter, __version__\n"
        "from hf_hsdraft.core.draft_tree import DraftTree\n"
        "import hf_hsdraft.core\n"
        "assert pickle.loads(pickle.dumps(CachebackDrafter)) is CachebackDrafter\n"
        "print(__version__, CachebackDrafter.__module__)\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True, text=True, env={**environment(), "PYTHONPATH": ""}, timeout=120,
    )  # fmt: skip
    assert done.stdout == f"{hf_hsdraft.__version__} hf_hsdraft.drafters.lookup.cacheback\n", done.stderr
