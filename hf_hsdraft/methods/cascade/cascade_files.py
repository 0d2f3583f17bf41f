"""Files of a cascade: valid names of its levels, and cleaning up after an earlier save."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from ...hub.drafter_files import CONFIG, check_is_drafter, read_json

CASCADE = "cascade"  # the `model_type`
HERE = "./"  # prefix of levels inside the cascade's folder

_PLACE = re.compile(r"\./(level_\d+)")  # of a level that was saved with the cascade


def check_names(names: Sequence[str], folder: Path, own: str) -> None:
    """Raises a ValueError if a level is the cascade itself, or begins with `./` and is outside `folder`.

    `own` is the cascade's folder or Hub name; empty if it is in a subfolder.
    """
    for index, name in enumerate(names):
        parts = PurePosixPath(name).parts
        outside = name.startswith(HERE) and (not parts or ".." in parts or "\\" in name)
        if outside or name == own or Path(name).resolve() == folder.resolve():
            raise ValueError(
                f"{folder / CONFIG} is damaged: levels[{index}]={name!r} is the cascade itself or lies outside of its "
                "folder; expected the name of another drafter, or a folder in it, as './level_0'"
            )


def former_places(folder: Path) -> list[str]:
    """Returns the level folders of the cascade saved in a folder."""
    try:
        check_is_drafter(folder, CASCADE)
        names = read_json(folder / CONFIG).get("levels")
    except (OSError, ValueError):
        return []
    found = [_PLACE.fullmatch(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return [match[1] for match in found if match]


def remove_others(folder: Path, place: str, written: Collection[Path]) -> None:
    """Deletes the files of a level's folder that are not in `written` (relative to `folder`), then empty folders."""
    for path in sorted((folder / place).rglob("*"), reverse=True):  # contents before their folder
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and path.relative_to(folder) not in written:
            path.unlink()
    if (folder / place).is_dir() and not any((folder / place).iterdir()):
        (folder / place).rmdir()
