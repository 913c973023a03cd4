"""Privacy on a machine with other users: folders that they cannot write to, and texts without credentials.

**Folders.** What a run creates is closed to others (`private_mode`). An existing folder is used only if nobody else can
have put files there (`check_access`) or put another folder in its place (`who_can_replace`), because a run resumes from
what it finds. To let a group in, create the folder first: what is created inside a folder that a group can write to is
open to that group.

**Credentials** belong in the environment. Options are recorded in files, logs and trackers, so one that holds a
credential is refused; `redact` removes credentials from texts of other origins, such as errors and uncommitted changes.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600

UID_MAP, OVERFLOW_UID = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")
MOUNTS = Path("/proc/self/mountinfo")


def private_mode(folder: Path, mode: int) -> int:
    """Return the mode of a new entry of ``folder``: ``mode``, and the same for a group that shares it.

    A group shares a folder that it, but not everybody, can write to.
    """
    shared = os.stat(folder).st_mode & (stat.S_IWGRP | stat.S_IWOTH) == stat.S_IWGRP
    return mode | (mode >> 3 if shared else 0)


def check_access(folder: Path, shared: bool = False) -> None:
    """Raise PermissionError if files in ``folder`` may be another user's; a missing folder passes.

    A private folder must belong to this user. Nobody else may be able to write to it, or to replace it
    (`who_can_replace`). A shared folder may also

    * belong to this user or to root, and be writable by any group;
    * belong to anybody, and be writable by a group of this user;
    * if this user is root, belong to the owner of the folder that is mounted there (`_owner_of_mount`).
    """
    try:
        link, found = os.lstat(folder), os.stat(folder)
    except FileNotFoundError:
        return
    owners = {os.geteuid()}
    if shared:
        owners |= {0, found.st_uid} if _is_of_own_group(found) else {0, _owner_of_mount(folder)}
    others = found.st_mode & (stat.S_IWOTH if shared else stat.S_IWOTH | stat.S_IWGRP)
    if {link.st_uid, found.st_uid} <= owners and not others:
        if not shared and (who := who_can_replace(folder)):
            raise PermissionError(errno.EPERM, f"others can replace it: {who}", str(folder))
        return
    made = folder / f".access-{os.urandom(8).hex()}"
    with suppress(OSError):  # not every file system has owners and modes: one that shows those of any entry has none
        file = os.open(made, os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        shown = os.fstat(file)  # not by its name, which the folder's owner could give to another file
        os.close(file)
        os.unlink(made)
        owners.add(shown.st_uid)
        others &= ~shown.st_mode
    if foreign := {link.st_uid, found.st_uid} - owners:
        raise PermissionError(errno.EPERM, f"it belongs to {user_name(foreign.pop())}", str(folder))
    if others:
        mode, close = stat.S_IMODE(found.st_mode), "chmod o-w" if shared else "chmod go-w"
        reason = f"other users can write to it (mode {mode:04o}); close it with {close} {shlex.quote(str(folder))}"
        raise PermissionError(errno.EPERM, reason, str(folder))


def who_can_replace(folder: Path) -> str:
    """Return who, besides root and a group of this user, can put another folder in the place of ``folder``, or "".

    That is whoever owns a folder or link above it, or can write to a folder above without the sticky bit.
    """
    owners = {os.geteuid(), 0}
    with suppress(OSError):
        if UID_MAP.read_text().split() != ["0", "0", "4294967295"]:  # in a container root of the machine has another id
            owners.add(int(OVERFLOW_UID.read_text()))
    for above in _folders_above(folder):
        found = os.lstat(above)
        is_shared = _is_of_own_group(found) and not stat.S_ISLNK(found.st_mode)
        if found.st_uid not in owners and not is_shared:
            return f"{above} belongs to {user_name(found.st_uid)}"
        if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
            continue
        if found.st_mode & stat.S_IWOTH:
            return f"everybody can write to {above} (mode {stat.S_IMODE(found.st_mode):04o}), without the sticky bit"
        if found.st_mode & stat.S_IWGRP and found.st_uid != os.geteuid() and found.st_gid and not is_shared:
            return f"group {found.st_gid} can write to {above} (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def _folders_above(path: Path) -> Iterator[Path]:
    """Yield the folders and links above a path, and those above what the links lead to."""
    for above in Path(os.path.abspath(path)).parents:
        yield above
        if above.is_symlink():
            yield from _folders_above(above.parent / os.readlink(above) / "x")


def _is_of_own_group(found: os.stat_result) -> bool:
    """Return True if a group of this user can write to a folder."""
    return bool(found.st_mode & stat.S_IWGRP) and found.st_gid in {os.getegid(), *os.getgroups()}


def _owner_of_mount(folder: Path) -> int:
    """Return who owns the folder of this machine that root has mounted at or above ``folder``; 0 for a whole disk.

    A container has folders of its user mounted like that, and often runs as root.
    """
    mounts = [(0, "/", "/")]
    with suppress(OSError):
        lines = (line.split() for line in MOUNTS.read_text().splitlines())
        mounts += [(len(place), place, root) for _, _, _, root, place, *_ in lines]
    real = Path(os.path.realpath(folder))
    _, place, root = max(mount for mount in mounts if real.is_relative_to(mount[1]))
    return 0 if root == "/" or os.geteuid() else os.stat(place).st_uid


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if it has none."""
    import pwd  # not on Windows

    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|JWT|AUTH|SPANK", re.IGNORECASE)
"""Part of the names of environment variables that may hold credentials; plugins of Slurm get theirs in SPANK ones."""

REDACTED = "***"

_NAME_END = r"[\"']?\s{0,9}[:=]\s{0,9}[\"']?"
_RANDOM = r"(?=[\w/+=.~-]{0,256}\d)(?=[\w/+=.~-]{0,256}[A-Za-z])[\w/+=.~-]{16,4096}+(?![\w(\[])"

CREDENTIALS = (
    # user:password@ of a URI, where a port is no password; a token in place of both; a parameter of a query
    r"(?P<keep>://)[^\s/@:\[\"'<>]{0,256}:(?!/|\d+(?:[/?#]|$))[^\s@\"'<>]{1,256}(?:@[^\s/@\"'<>]{1,256}(?=@))*(?=@)",
    r"(?P<keep>https?://)[^\s/@:\"'<>]{20,256}(?=@)",
    r"(?i)(?P<keep>[?&#](?:[\w-]{0,64}(?:api|access|secret|auth|account)[_-]?key|key|sig|auth)=)[^\s&#\"'<>]+",
    r"(?i)(?P<keep>[?&#][\w-]{0,64}(?:token|secret|signature|passw(?:or)?d|pwd|credential|jwt)=)[^\s&#\"'<>]+",
    # documented forms: AWS; GitHub, GitLab, Docker, npm, PyPI; Hugging Face, W&B, NVIDIA, Google, Slack; OpenAI
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{36}|glpat-[\w-]{20}|dckr_pat_[\w-]{20}|npm_\w{36}|pypi-[\w-]{40})[\w-]*",
    r"\b(?:hf_[A-Za-z0-9]{30,}|wandb_v1_\w{20,}|nvapi-[\w-]{40,}|AIza[\w-]{35}|xox[abposr]-\d[\w-]{10,})",
    r"\bsk-(?:[A-Za-z0-9]{32,}|(?:proj|svcacct|ant|or)-[\w-]{32,})",
    r"\beyJ[\w-]{5,}\.eyJ[\w-]{5,}\.[\w-]+",
    r"-----BEGIN [A-Z ]{0,64}PRIVATE KEY-----(?:[^\"]*?-----END [A-Z ]{0,64}PRIVATE KEY-----|[^\"]*)",
)
"""Patterns of credentials. The group ``keep``, if there is one, is not part of the credential."""

NAMED_SECRETS = (
    rf"(?i)(?P<keep>(?:api|access|secret|private|auth|account)[_-]?key{_NAME_END}){_RANDOM}",
    rf"(?i)(?P<keep>(?:token|secret|passw(?:or)?d|credentials?){_NAME_END}){_RANDOM}",
    r"(?i)(?P<keep>passw(?:or)?d[\"']?(?:=|\s{0,9}[:=]\s{0,9}(?=[\"']))[\"']?)[^\s\"'()\[\]]{4,256}(?=[\s\"']|$)",
    rf"(?i)(?P<keep>\bbearer\s+|authorization{_NAME_END}basic\s+){_RANDOM}",
)
"""Patterns of values that may be credentials because of their names, such as ``token=``; paths can match too."""


def redact(text: str, certain: bool = False) -> str:
    """Replace what looks like a credential by ``***``; if ``certain``, only what has the form of one."""
    for pattern in CREDENTIALS if certain else CREDENTIALS + NAMED_SECRETS:
        text = re.sub(pattern, lambda match: match.groupdict().get("keep", "") + REDACTED, text)
    return text


def redact_json(value: Any) -> Any:
    """Redact all texts in a value of JSON, except names."""
    if isinstance(value, dict):
        return {name: redact_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(redact_json, value)]
    return redact(value) if isinstance(value, str) else value


def secret_variables(environ: Mapping[str, str]) -> set[str]:
    """Return the names of environment variables that may hold a credential."""
    return {name for name, value in environ.items() if SECRET_NAME.search(name) or redact(value) != value}
