"""What tests of HTML pages share: a real browser without a window."""

import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"
)


@pytest.fixture(scope="session")
def browse(tmp_path_factory):
    """`browse(page, "--dump-dom")` → what the browser prints, and its console; skips where there is none."""
    if BROWSER is None:
        pytest.skip("no chromium or google-chrome on the PATH")
    profile = tmp_path_factory.mktemp("profile")

    def go(page, *words):
        where = [f"--user-data-dir={profile}", "--enable-logging=stderr", *words, page.as_uri()]
        done = subprocess.run([BROWSER, *QUIET.split(), *where], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout, re.findall(r":CONSOLE.*", done.stderr)

    return go
