"""Nothing that another user planted is written to; the job goes on unwatched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from failslow.errors import ConfigError
from failslow.ownfiles import check_folder, open_own
from failslow.runtime.launch import launch

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files another's")
LOG = os.O_WRONLY | os.O_APPEND


def test_a_file_of_ours_is_made_and_appended_to(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        handle = open_own(tmp_path / "log", LOG)
        os.write(handle, text)
        os.close(handle)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_links_pipes_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises((ConfigError, IsADirectoryError), match=r"no regular file|directory"):
            open_own(tmp_path / name, LOG)
    assert not (tmp_path / "target").exists()


@root
def test_folders_and_links_of_others_are_refused(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    (ours / "in").mkdir(parents=True)
    check_folder(ours)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(ConfigError, match="is a folder of user 12345, not 0; remove it, or name"):
        check_folder(theirs)
    link = tmp_path / "link"
    link.symlink_to(ours)
    check_folder(link / "in")  # a person's own link is as good as a folder
    os.chown(link, 12345, 12345, follow_symlinks=False)
    for place in (link, link / "in"):
        with pytest.raises(ConfigError, match="link: is a link of user 12345"):
            check_folder(place)


@root
@pytest.mark.parametrize("planted", ["folder", "log"])
def test_a_job_is_not_watched_where_others_planted_something(planted: str, tmp_path: Path) -> None:
    run, rings = tmp_path / "run", tmp_path / "rings"
    run.mkdir()
    rings.mkdir()
    if planted == "folder":
        os.chown(run, 12345, 12345)
    else:
        (run / "runtime.log").symlink_to(tmp_path / "victim")
    environ = {
        "RANK": "0",
        "FAILSLOW_JOB": "job",
        "FAILSLOW_DIR": str(run),
        "PATH": "",
        "FAILSLOW_CAPTURE_FOLDER": str(rings),
    }
    with pytest.raises(ConfigError, match="remove it, or name another folder"):
        launch(environ)
    assert not (tmp_path / "victim").exists()
    assert list(rings.iterdir()) == []
