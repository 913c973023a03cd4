"""Privacy on a machine with other users: folders that they cannot write to, and texts without credentials.

**Folders.** What a run creates is closed to others (`private_mode`). An existing folder is used only if nobody else can
have put files there (`check_access`), because a run resumes from what it finds. To let a group in, create the folder
first: what is created inside a folder that a group can write to is open to that group.

**Credentials** belong in the environment. Options are recorded in files, logs and trackers, so one that holds a
credential is refused; `redact` removes credentials from texts of other origins, such as errors and uncommitted changes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


def private_mode(folder: Path, mode: int) -> int:
    """Return the mode of a new entry of ``folder``: ``mode``, and the same for a group that shares it.

    A group shares a folder that it, but not everybody, can write to.
    """
    shared = os.stat(folder).st_mode & (stat.S_IWGRP | stat.S_IWOTH) == stat.S_IWGRP
    return mode | (mode >> 3 if shared else 0)


def check_access(folder: Path, shared: bool = False) -> None:
    """Raise PermissionError if files in ``folder`` may be another user's; a missing folder passes.

    A private folder must belong to this user, who alone can write to it. A ``shared`` one may also belong to root, or
    be writable by a group: by any group if this user owns it, else by a group of this user.
    """
    try:
        link, found = os.lstat(folder), os.stat(folder)
    except FileNotFoundError:
        return
    owners = {os.geteuid(), *([0] if shared else [])}
    if shared and found.st_mode & stat.S_IWGRP and found.st_gid in {os.getegid(), *os.getgroups()}:
        owners.add(found.st_uid)
    others = found.st_mode & (stat.S_IWOTH if shared else stat.S_IWOTH | stat.S_IWGRP)
    if {link.st_uid, found.st_uid} <= owners and not others:
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
        fix = f"chmod {'o' if shared else 'go'}-w {folder}"
        reason = f"other users can write to it (mode {stat.S_IMODE(found.st_mode):04o}); {fix}"
        raise PermissionError(errno.EPERM, reason, str(folder))


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if it has none."""
    import pwd  # not on Windows

    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|JWT|AUTH|SPANK", re.IGNORECASE)
"""Part of the names of environment variables that may hold credentials; plugins of Slurm get theirs in SPANK ones."""

REDACTED = "***"

_RANDOM = r"(?=[\w/+=.~-]*\d)(?=[\w/+=.~-]*[A-Za-z])[\w/+=.~-]{16,}(?![\w(\[])"
SECRETS = tuple(
    re.compile(pattern)
    for pattern in (
        # user:password@ of a URI; a port is no password
        r"(?P<keep>://)(?:[^\s/@:\"'<>]*:(?!\d+(?:[/?#]|$))[^\s@\"'<>]+|[^\s/@:\"'<>]{20,})(?:@[^\s/@\"'<>]+(?=[^\s/\"'<>]*@))*(?=@)",
        r"(?i)(?P<keep>[?&][\w-]*(?:key|token|secret|signature|sig|password|credential)=)[^\s&\"'<>]+",
        # documented forms: AWS, GitHub, GitLab, Hugging Face, OpenAI, Slack, Google, W&B, JWT, private keys
        r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
        r"\b(?:gh[pousr]_|github_pat_|glpat-|wandb_v1_)[\w-]{16,}",
        r"\bhf_[A-Za-z0-9]{30,}",
        r"\bsk-[\w-]{20,}",
        r"\bxox[abposr]-[\w-]{10,}",
        r"\bAIza[\w-]{35}",
        r"\beyJ[\w-]{5,}\.[\w-]+\.[\w-]+",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[^\"]*?-----END [A-Z ]*PRIVATE KEY-----|[^\"]*)",
        # anything random under such a name
        rf"(?i)(?P<keep>(?:api|access|secret|private|auth)[_-]?key[\"']?\s*[:=]\s*[\"']?){_RANDOM}",
        rf"(?i)(?P<keep>(?:token|secret|passw(?:or)?d|credentials?)[\"']?\s*[:=]\s*[\"']?){_RANDOM}",
        r"(?i)(?P<keep>passw(?:or)?d[\"']?(?:=|\s*[:=]\s*(?=[\"']))[\"']?)[^\s\"'()\[\]]{4,}(?=[\s\"']|$)",
        rf"(?i)(?P<keep>\b(?:bearer|basic)\s+){_RANDOM}",
    )
)
"""What looks like a credential, from its beginning or after ``keep``."""


def redact(text: str) -> str:
    """Replace what looks like a credential by ``***``."""
    for pattern in SECRETS:
        text = pattern.sub(lambda match: match.groupdict().get("keep", "") + REDACTED, text)
    return text


def secret_variables(environ: Mapping[str, str]) -> set[str]:
    """Return the names of environment variables that may hold a credential."""
    return {name for name, value in environ.items() if SECRET_NAME.search(name) or redact(value) != value}
