"""The OpenAPI document is true: requests made from it, good and bad, get the answers that it promises."""

import os
import subprocess
import sys
from pathlib import Path

from ..harness import IN_FULL_EACH_STORE, TOKEN

ROOT = Path(__file__).parents[3]


@IN_FULL_EACH_STORE
def test_the_document_is_true(serve, tmp_path, times):
    server = serve(max_sessions=10**6, token=TOKEN)
    server.write("known", ("a text", 0, 2), ("another", 2, 4))
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {TOKEN}"),
            *("--mode", "all", "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", str(times(500)), "--continue-on-failure", "--generation-database", "none"),
            *("--no-color", "--warnings", "off"),
        ],
        env=os.environ | {"SCHEMATHESIS_HOOKS": "rescue.contract.hooks", "PYTHONPATH": str(ROOT / "tests")},
        cwd=tmp_path,  # it keeps a cache where it runs
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "Tested: 14" in run.stdout
    assert not [line for line in server.lines() if line["level"] == "error"]
