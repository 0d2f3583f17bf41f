"""Which folders and files code is run from: those that no other user can change or exchange."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hf_hsdraft.core import cache_folder

STRANGER = 12345
pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="users of POSIX systems")
as_root = pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="makes folders of another user")


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """A cache and a temporary folder, which are the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    cache_folder._of_this_process.cache_clear()
    yield tmp_path
    cache_folder._of_this_process.cache_clear()


def test_folders_are_made_for_their_owner_alone(places):
    before = os.umask(0)
    try:
        folder = cache_folder.private_folder("layers")
    finally:
        os.umask(before)
    assert folder == places / "home" / "cache" / "hf_hsdraft" / "layers"
    while folder != places:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder = folder.parent


def _open(path):
    path.chmod(0o777)


def _group(path):
    path.chmod(0o775)


def _given_away(path):
    os.chown(path, STRANGER, STRANGER)


def _linked_by_a_stranger(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    os.lchown(path, STRANGER, STRANGER)


def _linked_into_an_open_folder(path):
    (path.parent / "open").mkdir()
    path.rename(path.parent / "open" / "there")
    (path.parent / "open").chmod(0o777)
    path.symlink_to(path.parent / "open" / "there")


HARMS = [_open, _group, *(pytest.param(each, marks=as_root) for each in (_given_away, _linked_by_a_stranger))]


@pytest.mark.parametrize("harm", [*HARMS, _linked_into_an_open_folder])
@pytest.mark.parametrize("depth", range(4))
def test_where_others_can_exchange_a_folder_another_is_taken_and_the_reason_told(places, monkeypatch, harm, depth):
    folder = cache_folder.private_folder("layers")
    harm([folder, *folder.parents][depth])
    warned = []
    monkeypatch.setattr(cache_folder.logger, "warning_once", warned.append)
    taken = cache_folder.private_folder("layers")
    assert taken.is_relative_to(places / "temporary") and cache_folder.is_private(taken)
    assert taken == cache_folder.private_folder("layers"), "one for the process"
    assert "can be written to by others" in warned[0] and "chmod go-w" in warned[0]


def test_without_a_safe_temporary_folder_nothing_is_run(places):
    cache_folder.private_folder("layers").chmod(0o777)
    (places / "temporary").chmod(0o777)
    with pytest.raises(OSError, match="TMPDIR"):
        cache_folder.private_folder("layers")
    (places / "temporary").chmod(0o1777)  # as /tmp is
    assert cache_folder.is_private(cache_folder.private_folder("layers"))


def test_links_of_the_user_are_followed(places):
    (places / "disk").mkdir()
    (places / "home").mkdir()
    (places / "home" / "cache").symlink_to("../disk")
    assert cache_folder.private_folder("layers") == places / "disk" / "hf_hsdraft" / "layers"
    (places / "round").symlink_to("round")
    with pytest.raises(OSError, match="links"):
        cache_folder.check_place(places / "round")


def test_what_stands_in_the_way_is_told(places, monkeypatch):
    warned = []
    monkeypatch.setattr(cache_folder.logger, "warning_once", warned.append)
    (places / "home").write_text("")
    cache_folder.private_folder("layers")
    assert "is no folder" in warned[0]


def test_the_temporary_folder_goes_with_the_process(places):
    code = "import pathlib; from hf_hsdraft.core.cache_folder import private_folder as made; print(made('layers'))"
    (places / "home").mkdir()
    (places / "home").chmod(0o777)
    environment = {**os.environ, "TMPDIR": str(places / "temporary")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert Path(done.stdout.strip()).is_relative_to(places / "temporary") and not list(places.glob("temporary/*"))


def test_a_file_is_run_only_if_the_user_alone_can_write_to_it(tmp_path):
    path = tmp_path / "program"
    assert not cache_folder.is_own(path)
    path.write_text("")
    path.chmod(0o644)
    assert cache_folder.is_own(path)
    for mode in (0o666, 0o664, 0o646):
        path.chmod(mode)
        assert not cache_folder.is_own(path)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert not cache_folder.is_own(tmp_path / "link") and not cache_folder.is_own(tmp_path / "pipe")
    if os.getuid() == 0:
        os.chown(path, STRANGER, STRANGER)
        assert not cache_folder.is_own(path)
