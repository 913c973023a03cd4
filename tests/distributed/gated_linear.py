"""The plugin of docs/mixers.md as a module for ``--plugin``, with short chunks: samples have several."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "mixers.md"

(TEXT,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
exec(compile(TEXT.replace("CHUNK = 64", "CHUNK = 5"), str(PAGE), "exec"))
