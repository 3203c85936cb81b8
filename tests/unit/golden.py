"""Compare output with a file; AUTOTP_REFRESH_GOLDEN=1 writes the file instead."""

import os
from pathlib import Path

HERE = Path(__file__).parent / "golden"


def check_golden(name, text):
    path = HERE / name
    if os.environ.get("AUTOTP_REFRESH_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs; AUTOTP_REFRESH_GOLDEN=1 pytest writes it anew"
