"""docs/settings.md is made from the code; here it is compared with it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_setting_is_explained_and_the_page_is_up_to_date():
    script = "import sys; sys.path.insert(0, 'tools'); import settings_doc; sys.stdout.write(settings_doc.render())"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout == (ROOT / "docs" / "settings.md").read_text(encoding="utf-8"), (
        "run: python tools/settings_doc.py"
    )
    rows = [line for line in run.stdout.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert not [row for row in rows if row.endswith("|  |")]
