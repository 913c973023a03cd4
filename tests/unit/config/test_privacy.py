"""Folders that may hold another user's files, permissions of new ones, and texts that look like credentials."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.checkpoint.durable_files import make_folder
from megatron.config import privacy
from megatron.config.privacy import check_access, private_mode, redact, secret_variables, user_name, who_can_replace
from tests.kit.users import NOBODY, as_user, give, needs_root, public_folder

ME, MATE, TEAM = 1501, 1502, 4321


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as around:
        (around / "it").mkdir()
        yield around / "it"


@needs_root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "private", "shared"),
    [
        (ME, ME, 0o700, "", ""),
        (ME, ME, 0o755, "", ""),
        (
            ME,
            ME,
            0o777,
            "other users can write to it (mode 0777); close it with chmod go-w ",
            "(mode 0777); close it with chmod o-w ",
        ),
        (ME, ME, 0o1777, "(mode 1777)", "(mode 1777)"),
        (ME, ME, 0o702, "(mode 0702)", "(mode 0702)"),
        (ME, TEAM, 0o2770, "(mode 2770); close it with chmod go-w ", ""),
        (ME, NOBODY, 0o770, "(mode 0770)", ""),
        (0, 0, 0o755, "it belongs to root", ""),
        (0, 0, 0o757, "it belongs to root", "(mode 0757)"),
        (MATE, MATE, 0o755, f"it belongs to user {MATE}", f"it belongs to user {MATE}"),
        (MATE, TEAM, 0o2750, f"it belongs to user {MATE}", f"it belongs to user {MATE}"),
        (MATE, TEAM, 0o2770, f"it belongs to user {MATE}", ""),
        (MATE, TEAM, 0o777, f"it belongs to user {MATE}", "(mode 0777)"),
        (MATE, MATE, 0o770, f"it belongs to user {MATE}", f"it belongs to user {MATE}"),
        (NOBODY, NOBODY, 0o777, f"it belongs to {user_name(NOBODY)}", f"it belongs to {user_name(NOBODY)}"),
    ],
)
def test_folders_open_to_others_are_refused(
    folder: Path, owner: int, group: int, mode: int, private: str, shared: str
) -> None:
    os.chown(folder, owner, group)
    folder.chmod(mode)
    for share, problem in ((False, private), (True, shared)):
        check = partial(check_access, folder, shared=share)
        if not problem:
            as_user(ME, check, [TEAM])
            continue
        with pytest.raises(PermissionError) as refused:
            as_user(ME, check, [TEAM])
        assert problem in str(refused.value.strerror)
        assert refused.value.filename == str(folder)
    assert [*folder.iterdir()] == []


@needs_root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "problem"),
    [
        (ME, ME, 0o777, "everybody can write to {above} (mode 0777), without the sticky bit"),
        (ME, ME, 0o1777, ""),
        (0, 0, 0o1777, ""),
        (0, TEAM, 0o2770, ""),
        (0, MATE, 0o2775, f"group {MATE} can write to {{above}} (mode 2775)"),
        (ME, MATE, 0o2775, ""),
        (MATE, TEAM, 0o2770, ""),
        (MATE, MATE, 0o755, f"{{above}} belongs to user {MATE}"),
        (MATE, MATE, 0o1777, f"{{above}} belongs to user {MATE}"),
    ],
)
def test_folders_others_can_replace_are_refused(folder: Path, owner: int, group: int, mode: int, problem: str) -> None:
    give(folder, ME, 0o700)
    os.chown(folder.parent, owner, group)
    folder.parent.chmod(mode)
    check = partial(check_access, folder)
    as_user(ME, partial(check_access, folder, shared=True), [TEAM])
    if problem:
        with pytest.raises(PermissionError) as refused:
            as_user(ME, check, [TEAM])
        assert refused.value.strerror == "others can replace it: " + problem.format(above=folder.parent)
    else:
        as_user(ME, check, [TEAM])


@needs_root
def test_the_owner_of_a_link_above_is_checked(folder: Path) -> None:
    give(folder, ME, 0o700)
    link = folder.with_name("link")
    link.symlink_to(folder)
    inside = link / "inside"
    as_user(ME, partial(make_folder, inside, private=True))
    for owner, problem in ((ME, ""), (0, ""), (MATE, f"{link} belongs to user {MATE}")):
        os.lchown(link, owner, owner)
        assert as_user(ME, partial(who_can_replace, inside)) == problem


@needs_root
def test_owner_and_target_of_a_link_are_checked(folder: Path) -> None:
    give(folder, ME, 0o700)
    link = folder.with_name("link")
    link.symlink_to(folder)
    for owner in (NOBODY, ME):
        os.lchown(link, owner, owner)
        if owner == ME:
            as_user(ME, partial(check_access, link))
        else:
            with pytest.raises(PermissionError):
                as_user(ME, partial(check_access, link, shared=True))
    with pytest.raises(PermissionError, match="it belongs to user"):
        as_user(MATE, partial(check_access, link, shared=True))
    check_access(folder / "missing")


@needs_root
def test_root_of_a_container_uses_mounts_of_its_user(folder: Path) -> None:
    """A folder of the user, but no other user's, and none that is not mounted."""
    for name, owner in (("mine", ME), ("mine/run", ME), ("mine/his", MATE), ("place", 0)):
        (folder / name).mkdir()
        os.chown(folder / name, owner, owner)
    check = "import sys; from pathlib import Path; from megatron.config.privacy import check_access\n"
    check += "for name in sys.argv[1:]:\n try: check_access(Path(name), shared=True); print('used')\n"
    check += " except PermissionError as error: print(error.strerror)"
    mount = 'mount --bind mine place && exec "$@"'
    names = ["mine", "place", "place/run", "place/his"]
    words = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", check, *names]
    environ = os.environ | {"PYTHONPATH": str(Path(privacy.__file__).parents[2])}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr:
        pytest.skip("no mounts in this container")
    refused = "it belongs to user"
    assert done.stdout.splitlines() == [f"{refused} {ME}", "used", "used", f"{refused} {MATE}"], done.stderr


def test_a_file_system_without_owners_and_modes_is_as_good_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that shows the same for every entry, such as a Windows disk or an export that maps all users to one."""
    shown = SimpleNamespace(st_uid=NOBODY, st_gid=NOBODY, st_mode=stat.S_IFDIR | 0o777)
    with monkeypatch.context() as patched:
        for name in ("lstat", "stat", "fstat"):
            patched.setattr(os, name, lambda path: shown)
        check_access(tmp_path)
        check_access(tmp_path, shared=True)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("around", [0o700, 0o755, 0o1777])
def test_new_files_are_closed_to_others(tmp_path: Path, around: int) -> None:
    tmp_path.chmod(around)
    assert private_mode(tmp_path, privacy.PRIVATE_FILE) == 0o600
    make_folder(tmp_path / "a" / "b", private=True)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b")] == [0o700, 0o700]


def test_new_files_in_a_group_folder_are_open_to_the_group(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        tmp_path.chmod(0o2770)
        make_folder(tmp_path / "a" / "b", private=True)
        assert [stat.S_IMODE((tmp_path / name).stat().st_mode) & 0o777 for name in ("a", "a/b")] == [0o770, 0o770]
        assert private_mode(tmp_path / "a", privacy.PRIVATE_FILE) == 0o660
    finally:
        os.umask(before)


SECRET = {
    "memory://user:LEAK@host/run": "memory://***@host/run",
    "s3://AKIAX:LE/AK+7@bucket/x": "s3://***@bucket/x",
    "https://u:LE@AK@host/x": "https://***@host/x",
    "redis://:LEAK@host": "redis://***@host",
    f"https://LEAK{'x' * 20}@host/it.git": "https://***@host/it.git",
    "https://host/x?b=1&access_token=LEAK&X-Amz-Signature=LEAK": "https://host/x?b=1&access_token=***&X-Amz-Signature=***",
    "AKIALEAK567890123456": "***",
    f"ghp_LEAK{'a1' * 16} x": "*** x",
    f"sk-LEAK{'a1' * 20}": "***",
    f"sk-proj-LEAK{'_a-1' * 12}": "***",
    f"token={'a1' * 400}LEAK": "token=***",
    "https://host/x?key=LEAK&my-api-key=LEAK&b=1": "https://host/x?key=***&my-api-key=***&b=1",
    "https://host/x?jwt=LEAK#access_token=LEAK": "https://host/x?jwt=***#access_token=***",
    "https://host/x?passwd=LEAK": "https://host/x?passwd=***",
    f"hf_LEAK{'aB' * 15}": "***",
    "eyJhbGciOiJIUzI1NiJ9.eyJMRUFLIjoxfQ.sig-LEAK": "***",
    "WANDB_API_KEY=LEAK0123456789abcdef": "WANDB_API_KEY=***",
    "+  api_key: 'LEAK0123456789abcdef'": "+  api_key: '***'",
    '"secret": "LEAK0123456789abcdef"': '"secret": "***"',
    '+password = "LEAK"': '+password = "***"',
    "PASSWORD=LEAKs more": "PASSWORD=*** more",
    "Authorization: Bearer LEAK0123456789abcdef": "Authorization: Bearer ***",
    "-----BEGIN RSA PRIVATE KEY-----\nLEAK\n-----END RSA PRIVATE KEY-----\nx": "***\nx",
    '{"a": "-----BEGIN PRIVATE KEY-----\\nLEAK", "b": 1}': '{"a": "***", "b": 1}',
}


@pytest.mark.parametrize("text", SECRET)
def test_credentials_are_removed(text: str) -> None:
    assert redact(text) == SECRET[text]
    assert redact(SECRET[text]) == SECRET[text]
    assert "LEAK" not in redact(f"before {text} after")


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/run",
        "ssh://git@github.com/us/it.git",
        "git@github.com:us/it.git",
        "http://127.0.0.1:29500/a@b",
        "https://host:9000/bucket/model@v2?x=1",
        "http://host:8080?q=a@b",
        "file:///a:b@c",
        '{"a":"http://h:x","b":"c@d"}',
        "consumed-tokens: 123456789012345678",
        "tokenizer-model=meta-llama/Llama-3.1-8B-Instruct",
        "+    token = tokenizer1.encode_special_token(text)",
        "+    key = layers.12.self_attention.weight",
        "+    password = getpass.getpass()",
        "eos_token: <|endoftext|>",
        "hf_config_of_something_with_a_very_long_name",
        "the basic configuration of everything",
        "cc100/sk-wikipedia-slovak-2024-cleaned-deduplicated_text_document",
        "basic chinese_corpus_2024_v2",
        "abfss://mycontainerforcheckpoints@account.dfs.core.windows.net/run1",
        "ghp_benchmarks_of_2024_january_and_of_february",
        "eyJ-dataset.v2.final",
        "https://host/x?sortkey=name&primary_key=id&design=new",
        "http://[::1]:8080/p@q",
        "nfs://server:/export/alice@corp/x",
        "0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_other_texts_are_not_changed(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("text", ["/x/token=llama3-128k-vocab-v2/part", "/x/password=none/part", "password: word1234"])
def test_a_name_alone_makes_nothing_a_credential(text: str) -> None:
    assert redact(text, certain=True) == text


@pytest.mark.parametrize(
    "part", ["://", "token=", "token=a1", "password=a(", "-----BEGIN PRIVATE KEY-----", "a@", "?k"]
)
def test_the_time_for_a_long_text_is_bounded(part: str) -> None:
    began = time.process_time()
    redact(part * (60_000 // len(part)))
    assert time.process_time() - began < 3


def test_variables_that_may_hold_a_credential() -> None:
    secret = {"SLURM_JWT": "x", "WANDB_API_KEY": "x", "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "SPANK_A": "x"}
    secret |= {"SLURM_SPANK__PYXIS": "x", "http_proxy": "http://me:word@proxy:3128"}
    plain = {"SLURM_JOB_ID": "7", "NCCL_DEBUG": "INFO", "HOME": "/root", "https_proxy": "http://proxy:3128"}
    assert secret_variables(secret | plain) == secret.keys()
