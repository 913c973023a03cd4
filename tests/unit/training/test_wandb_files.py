from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.loggers.wandb import leveldb_records

BLOCK, HEADER = 32768, 7


def log(contents: list[bytes]) -> bytes:
    """A file of these records, by the description of LevelDB's log format; checksums are left out."""
    data = bytearray(b":W&B\xe1\xbe\x00")
    for content in contents:
        kind = 1
        while True:
            room = BLOCK - len(data) % BLOCK
            if room < HEADER:
                data += bytes(room)
                room = BLOCK
            part, content = content[: room - HEADER], content[room - HEADER :]
            kinds = {(1, True): 1, (1, False): 2, (3, False): 3, (3, True): 4}
            data += struct.pack("<IHB", 0, len(part), kinds[kind, not content]) + part
            kind = 3
            if not content:
                break
    return bytes(data)


SIZES = st.lists(
    st.sampled_from([0, 1, 100, BLOCK - 30, BLOCK - 15, BLOCK - 14, BLOCK - 13, BLOCK, 3 * BLOCK]), max_size=6
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(sizes=SIZES)
def test_records_are_read_as_they_were_written(sizes: list[int]) -> None:
    contents = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    assert list(leveldb_records(log(contents))) == contents


@settings(max_examples=40, derandomize=True, deadline=None)
@given(sizes=SIZES, share=st.floats(0, 1))
def test_a_file_that_was_cut_off_gives_the_records_before(sizes: list[int], share: float) -> None:
    contents = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    whole = log(contents)
    found = list(leveldb_records(whole[: 7 + int(share * (len(whole) - 7))]))
    assert found == contents[: len(found)]
