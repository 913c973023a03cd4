"""Triton's interpreter, where tests of kernels run in it (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import os
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":

    @pytest.fixture(autouse=True)
    def scalar_indices(monkeypatch: pytest.MonkeyPatch) -> None:
        """Let loops end at a tensor of one element: NumPy 2.5 rejects ``int()`` of it."""
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        patch = interpreter._patch_lang_tensor

        def patched(tensor: Any, scope: Any) -> None:
            patch(tensor, scope)
            tensor.__index__ = lambda self: self.handle.data.item()

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
